"""Twins in CUDA C++ of operations in the folder above: same files, names and results.

They run where `kernels.preferences` or KVPOLICY_KERNELS chooses them. Their kernels are
in csrc/; setup.py builds them.
"""
