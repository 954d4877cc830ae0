"""Twins in CUDA C++ of operations in the folder above: same files, names and results.

Imported where they are asked for; their kernels are in csrc/, built by setup.py.
"""
