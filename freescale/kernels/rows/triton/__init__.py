"""Triton kernels over rows of a table."""
