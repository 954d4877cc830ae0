"""Twins in C++ for the CPU of operations in the folder above: same files and names.

They run on CPUs, where setup.py has built them from csrc/cpu. What their kernels do is
compiled for several kinds of a CPU, and chosen when they run.
"""
