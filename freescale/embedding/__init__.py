"""Tables of item vectors: rows, their optimizers, and how they are spread over ranks."""
