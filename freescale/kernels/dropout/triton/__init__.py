"""Triton kernels of keyed dropout."""
