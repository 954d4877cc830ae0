"""Trains the write gates of a model (WG-KV)."""
