"""Measures a policy on an NVIDIA GPU: `python -m benchmarks.gpu PART`."""
