"""Requests with candidates and caches of histories: what answers users."""
