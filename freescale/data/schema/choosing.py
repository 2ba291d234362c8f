"""The features a recipe asks for, out of those a data set holds: what was stored stays, how it is used may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freescale.data.schema.feature import STRUCTURAL, Feature, Schema
from freescale.data.schema.reading import read_schema
from freescale.errors import nearest

# What a value is was decided when it was stored.
_STORED = {"of": "of", "kind": "is", "values": "values", "names": "names", "width": "width"}


def choose_features(stored: Schema, asked: Mapping[str, Any], problems: list[str]) -> Schema:
    """The schema of a run: what a recipe names, or all that the data set holds where it names nothing.

    Args:
        stored: of the data set.
        asked: section `features` of the recipe.
        problems: where those found are added.
    """
    if not asked:
        return stored
    wanted = read_schema(asked, problems)
    for each in wanted:
        if each.cross or each.name == "user":
            continue
        if each.name not in stored:
            problems.append(f"features.{each.name}: {_not_there(each.name, stored)}")
            continue
        problems += [f"features.{each.name}{text}" for text in _changes(each, stored[each.name])]
    # Times order events whether a recipe speaks of them or not.
    kept = {name: stored[name] for name in STRUCTURAL if name in stored and name not in wanted}
    return Schema({**kept, **{each.name: replace(each, column=None) for each in wanted}})


def _not_there(name: str, stored: Schema) -> str:
    close = nearest(name, [each.name for each in stored])
    hint = f"did you mean {close}?" if close else f"it has: {', '.join(each.name for each in stored)}"
    return f"the data set does not hold it; {hint} `freescale prepare --schema` keeps what a schema names"


def _changes(wanted: Feature, stored: Feature) -> list[str]:
    found = []
    for field, word in _STORED.items():
        said, there = getattr(wanted, field), getattr(stored, field)
        if field == "width" and said is None:
            continue
        if said != there:
            found.append(f".{word}: the data set was prepared with {_plain(there)}, got {_plain(said)}")
    if stored.outcome and not wanted.outcome:
        found.append(".outcome: the data set says that it is one; say outcome: true here, too")
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
