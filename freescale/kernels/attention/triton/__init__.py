"""Attention on a GPU: one autograd function over Triton kernels."""
