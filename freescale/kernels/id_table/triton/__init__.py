"""The id kernels on a GPU."""
