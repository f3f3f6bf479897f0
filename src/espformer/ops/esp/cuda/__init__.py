"""Kernels in CUDA C++."""
