"""Triton kernels of expert MLPs."""
