"""Attention on a CPU, and in plain PyTorch on any device."""
