"""Measures models for the scorers that need it."""
