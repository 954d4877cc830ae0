"""Attention layers over compacted tables, and other implementations to compare with."""
