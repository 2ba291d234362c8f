"""Batches padded to a few sizes, so that a step can be recorded and replayed: which sizes, and what fills them."""
