"""Sequence encoders and heads. They know kernels and batches, never ranks or tables."""
