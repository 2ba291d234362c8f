"""Fresh models for those who ask: versions of a run, what they bring, and a small server that follows them."""
