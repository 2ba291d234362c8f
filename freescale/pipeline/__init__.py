"""How the batches of a run flow: load, look up, (the model's work), update. Knows tables, never the model."""
