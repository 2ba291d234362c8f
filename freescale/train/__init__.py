"""The story of a run: train, evaluate, checkpoint, export."""
