"""The words of a schema, once: what checks, messages, recipes and documents say of them."""

from __future__ import annotations

from typing import Literal

Owner = Literal["event", "item", "user", "request"]
Kind = Literal["id", "ids", "number", "vector", "bits", "time"]
Place = Literal["join", "front", "after"]
Scale = Literal["none", "log", "standard"]

OWNERS: tuple[Owner, ...] = ("event", "item", "user", "request")
KINDS: tuple[Kind, ...] = ("id", "ids", "number", "vector", "bits", "time")
PLACES: tuple[Place, ...] = ("join", "front", "after")
SCALES: tuple[Scale, ...] = ("none", "log", "standard")

# Word -> (what may stand behind it, what it means).
WORDS: dict[str, tuple[str, str]] = {
    "of": (" | ".join(OWNERS), "whose value it is: one an event, an item, a user or a request"),
    "is": (" | ".join(KINDS), "what it is; `ids` are several values, `bits` several of a few names"),
    "cross": ("list of features", "an id made of other ids: the hash of its name and theirs, in this order"),
    "table": ("text", "where its rows live; features may share one. Its own name unless given"),
    "rows": ("int", "rows of that table"),
    "map": ("text", "how ids become rows: direct, hash, zero_collision"),
    "dim": ("int", "width of those rows"),
    "values": ("list of text", "all values an id can have, numbered in this order"),
    "names": ("list of text", "of bits: the name of each"),
    "width": ("int", "of a vector: its numbers; of ids: the most values kept of one list"),
    "scale": (
        " | ".join(SCALES),
        "of a number: as it is, its logarithm, or mean 0 and deviation 1 in training",
    ),
    "edges": ("list of number", "of a number: borders of buckets, which make it an id"),
    "outcome": ("bool", "known only after the event: never shown to a candidate, may be a label"),
    "as": (" | ".join(PLACES), "joined to its event's token, in front of the history, or behind its event"),
    "column": ("text", "its name in the input, if another"),
}

MOST_BITS = 63
MOST_VALUES = 64
"""Values of one list that are kept unless `width` says otherwise."""

NONE = -(2**63)
"""In place of an id: there is none. No id is this number."""
