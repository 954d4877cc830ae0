"""Reads, measures and draws traces of what events kept."""
