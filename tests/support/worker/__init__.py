"""Caches and batches of events without an engine or a model."""
