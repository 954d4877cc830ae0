"""Twins in Triton of the operations in the folder above: same names and results.

A twin's file has the name of its reference's. `block_lists`, `radix_select` and
`segment_cuts` are helpers without a reference. All of them are imported when an
operation first runs on a GPU.
"""
