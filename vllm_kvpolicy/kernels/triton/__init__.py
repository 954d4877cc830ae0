"""Twins in Triton of the operations in the folder above: same files, names and results.

Imported when an operation first runs on a GPU.
"""
