"""Ids that are words: their 64-bit hashes, the words kept beside them, and the way back from a hash to its word."""
