"""Jagged batches and the examples they hold: histories cut, split and given targets; segments, texts."""
