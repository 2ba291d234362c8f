"""Which steps of a GPU are recorded and replayed, as far as their size decides it."""

from __future__ import annotations

MOST_REPLAYED_TOKENS = 262_144
"""A rank's usual step has fewer. More keep a GPU busy by themselves, while the host goes on."""
