"""Reads, measures and draws traces of what events kept; checks paths of outputs."""
