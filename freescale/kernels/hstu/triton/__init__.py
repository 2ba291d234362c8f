"""Triton kernels of an HSTU step beside attention."""
