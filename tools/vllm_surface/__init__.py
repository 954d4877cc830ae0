"""Compares what we rely on in vLLM with what a release has: see `__main__`."""
