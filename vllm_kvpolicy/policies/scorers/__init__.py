"""Scorers: how important each cached token is, one method per file."""
