"""Requests answered again and again: caches of histories, many of them in one store, recorded as CUDA graphs."""
