"""Whether files are as they were written: their sums, and what damage looks like to those who read them."""
