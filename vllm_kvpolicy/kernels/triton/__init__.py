"""Twins in Triton of the operations in the folder above: same names and results.

They take and return what their references do, exactly where nothing is said of
rounding; docstrings here say only what differs. So do those of kernels: a parameter
named as one of the operation has its shape and dtype. A twin's file has the name of its
reference's. All of them are imported when an operation first runs on a GPU.
"""
