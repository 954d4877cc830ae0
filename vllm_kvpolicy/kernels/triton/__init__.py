"""Twins in Triton of the operations in the folder above: same files, names and results.

They are imported when an operation first runs on a GPU.
"""
