"""Which samples make a step, and which rank computes which sample. Plain numpy: no torch."""
