"""What the twins in C++ and in CUDA C++ share."""
