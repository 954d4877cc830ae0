"""Trains a model to decide which tokens to drop (DMS)."""
