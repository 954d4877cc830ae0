"""Traces of what events kept: their files, measures and figures."""
