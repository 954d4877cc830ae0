"""Trains a model to decide which tokens it drops (DMS)."""
