"""Checks kernels and engines on an NVIDIA GPU: `python -m benchmarks.gpu check`."""
