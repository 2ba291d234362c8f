"""Events sorted by user and time in bounded memory, and which of them are there twice."""
