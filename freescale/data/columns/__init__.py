"""The columns of raw input: which plays which part, and the values of each part as checked numbers."""
