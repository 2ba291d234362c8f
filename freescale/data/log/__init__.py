"""Rooms of data: a log of sealed windows, written once and trained on as it grows."""
