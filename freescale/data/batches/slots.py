"""Slots: where the row of an id stands among the unique rows that a batch brings along of its table.

slot       means
PAD        nothing: what fills up a list behind its last value
NO_ID      there is no id; a vector that is learnt stands for it
FIRST + k  row k
"""

from __future__ import annotations

PAD, NO_ID, FIRST = 0, 1, 2
SLOT = ".slot"
"""What the name of a feature ends with where a batch has its slots; no feature is called so."""
