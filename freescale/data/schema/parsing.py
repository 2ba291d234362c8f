"""From the words of one feature to a Feature: every word that cannot stand there is a problem, told with its path."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from freescale.data.schema.feature import Feature, usual_place
from freescale.data.schema.vocabulary import KINDS, MOST_BITS, OWNERS, PLACES, SCALES, WORDS, Owner
from freescale.errors import nearest

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Batches name what belongs to a target, a label or a row so, and other parts of a batch so.
_TAKEN_PREFIXES = ("target", "label_")
_TAKEN_NAMES = ("row", "negatives", "item_index", "negative_index", "fraction", "count", "train_count")
_TABLE_WORDS = ("table", "rows", "map", "dim")
# Words that only some kinds have.
_ONLY_FOR = {
    "values": ("id", "ids"),
    "names": ("bits",),
    "width": ("vector", "ids"),
    "scale": ("number",),
    "edges": ("number",),
}


def read_feature(name: object, given: object, problems: list[str], *, path: str) -> Feature | None:
    """The feature of these words, or None where it has problems; they are added to those there are.

    Args:
        name: of the feature.
        given: its words, word -> value.
        problems: where those found are added, each beginning with its path.
        path: of the feature, for messages.
    """
    found = _problems_of_name(name)
    if not isinstance(given, Mapping):
        problems.append(
            f"{path}: a feature is a mapping of words such as {{of: item, is: id}}, got {given!r}"
        )
        return None
    found += [("", f"{_unknown(word, WORDS, 'word')}") for word in given if word not in WORDS]
    words = {word: value for word, value in given.items() if word in WORDS}
    values = _typed(words, found)
    values = _of_cross(values, words, found) if "cross" in words else _of_column(values, words, found)
    _check_kind(values, words, found)
    if found:
        problems += [f"{path}.{word}: {text}" if word else f"{path}: {text}" for word, text in found]
        return None
    owner: Owner = values.get("of", "event")
    place = values.pop("as", usual_place(owner))
    kind = values.pop("is", "id")
    return Feature(name=str(name), kind=kind, of=owner, place=place, **_without(values, "of"))


Found = list[tuple[str, str]]
"""(word, what is wrong with it) of one feature."""


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _problems_of_name(name: object) -> Found:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return [("", f"a name is letters, digits and _, not a digit first; got {name!r}")]
    if name.startswith(_TAKEN_PREFIXES) or name in _TAKEN_NAMES:
        return [("", "batches use this name themselves; call the feature otherwise and set column")]
    return []


def _typed(words: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """Every word with a value of its type; the others are problems."""
    readers = {
        "of": lambda value: _one_of(value, OWNERS),
        "is": lambda value: _one_of(value, KINDS),
        "as": lambda value: _one_of(value, PLACES),
        "scale": lambda value: _one_of(value, SCALES),
        "cross": lambda value: _texts(value, "names of features", least=2),
        "values": lambda value: _texts(value, "values", least=1),
        "names": lambda value: _texts(value, "names", least=1),
        "table": _name,
        "map": _text,
        "column": _text,
        "rows": _count,
        "dim": _count,
        "width": _count,
        "edges": _edges,
        "outcome": _truth,
    }
    values: dict[str, Any] = {}
    for word, value in words.items():
        try:
            values[word] = readers[word](value)
        except ValueError as error:
            found.append((word, str(error)))
    return values


def _of_cross(values: dict[str, Any], words: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """A cross is an id without owner and column of its own; it needs rows."""
    for word in ("of", "is", "values", "column", "outcome"):
        if word in words:
            found.append((word, "a cross has none: it follows from its members"))
    if "rows" not in words:
        found.append(
            ("rows", "a cross needs them: its ids are hashed into that many rows, e.g. rows: 1000000")
        )
    return {**_without(values, "of", "is", "values", "column", "outcome"), "is": "id"}


def _of_column(values: dict[str, Any], words: Mapping[str, Any], found: Found) -> dict[str, Any]:
    for word, allowed in (("of", OWNERS), ("is", KINDS)):
        if word not in words:
            found.append((word, f"missing; allowed: {', '.join(allowed)}"))
    owner = values.get("of")
    if values.get("outcome") and owner not in (None, "event"):
        found.append(("outcome", f"only events have outcomes, and this is of {owner}"))
    place = values.get("as")
    places = {"event": "join, after", "item": "join", "user": "join, front", "request": "join"}.get(
        owner or ""
    )
    if place is not None and places is not None and place not in places:
        found.append(("as", f"a feature of {owner} goes as: {places}; got {place}"))
    return values


def _check_kind(values: dict[str, Any], words: Mapping[str, Any], found: Found) -> None:
    """Words that its kind does not have, or must have."""
    kind = values.get("is")
    if kind is None:
        return
    for word, kinds in _ONLY_FOR.items():
        if word in words and kind not in kinds:
            found.append((word, f"only for is: {' or '.join(kinds)}; this is {kind}"))
    for word, kind_of in (("names", "bits"), ("width", "vector")):
        if kind == kind_of and word not in words:
            found.append((word, f"{kind} needs it: {WORDS[word][1].split(';')[0]}"))
    if len(values.get("names", ())) > MOST_BITS:
        found.append(("names", f"at most {MOST_BITS} bits; got {len(values['names'])}"))
    in_table = kind in ("id", "ids") or "edges" in words
    for word in _TABLE_WORDS:
        if word in words and not in_table:
            remedy = "; with edges it has" if kind == "number" else ""
            found.append((word, f"a {kind} has no rows in a table{remedy}"))
    closed = "values" if "values" in words else "edges" if "edges" in words else None
    for word in ("rows", "map"):
        if closed and word in words:
            found.append(
                (word, f"does not go with {closed}, which say how many rows there are; leave one out")
            )
    if "edges" in words and values.get("scale", "none") != "none":
        found.append(("scale", "does not go with edges: a bucket has no size; leave one out"))


def _one_of(value: Any, allowed: Sequence[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    close = nearest(str(value), allowed)
    hint = f" (did you mean {close}?)" if close else ""
    raise ValueError(f"allowed: {', '.join(allowed)}; got {value!r}{hint}")


def _unknown(word: object, allowed: Mapping[str, Any], kind: str) -> str:
    close = nearest(str(word), allowed)
    hint = f"did you mean {close}?" if close else f"allowed: {', '.join(allowed)}"
    return f"unknown {kind} {word!r}; {hint}"


def _name(value: Any) -> str:
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    raise ValueError(f"must be a name of letters, digits and _; got {value!r}")


def _text(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"must be text; got {value!r}")


def _count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be a whole number, 1 or more; got {value!r}")


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be true or false; got {value!r}")


def _texts(value: Any, what: str, *, least: int) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) < least:
        raise ValueError(f"must be a list of {least} or more {what}; got {value!r}")
    for each in value:
        # YAML reads no, on and yes as truth values: nobody means these.
        if isinstance(each, bool):
            raise ValueError(f"YAML reads one of the {what} as {str(each).lower()}: put it in quotes")
        if not isinstance(each, str | int) or each == "":
            raise ValueError(f"must be texts or whole numbers; got {each!r}")
    texts = tuple(str(each) for each in value)
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return texts


def _edges(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    good = all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
        for each in numbers
    )
    if not numbers or not good:
        raise ValueError(f"must be a list of numbers; got {value!r}")
    edges = tuple(float(each) for each in numbers)
    if any(one >= other for one, other in itertools.pairwise(edges)):
        raise ValueError(f"must rise, e.g. [3, 10, 30]; got {list(numbers)}")
    return edges
