"""Which column of raw input plays which part."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.data.columns.time_like import looks_like_time
from freescale.data.excerpt import excerpt
from freescale.data.schema.feature import Feature
from freescale.errors import DataError, nearest

IGNORED = "_"
"""A name that says: nobody needs this column."""

# From the number of a column to its first values.
Sample = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class ColumnNames:
    """Which column of csv, jsonl, inter or parquet input plays which part.

    None looks for usual names such as user_id, itemId, timestamp, rating; "" leaves an optional column out.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    action: str | None = None


@dataclass(frozen=True)
class Role:
    """A part that a column can play."""

    usual_names: tuple[str, ...]
    allowed: str
    remedy: str
    optional: bool


_IDS = "a whole number of 64 bits, or text; not empty, and no mark of a missing value"
_CORRECT = "correct the input, or skip such lines (`--bad-lines skip`)"

ROLES = {
    "user": Role(
        ("user", "userid", "uid"),
        allowed=_IDS,
        remedy=_CORRECT,
        optional=False,
    ),
    "item": Role(
        ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin"),
        allowed=_IDS,
        remedy=_CORRECT,
        optional=False,
    ),
    # What times and actions are allowed is found in the input: columns/times.py, columns/actions.py.
    "time": Role(("time", "timestamp", "ts", "unixreviewtime"), allowed="", remedy="", optional=True),
    "action": Role(("action", "rating"), allowed="", remedy="", optional=True),
}


def choose_columns(
    path: Path,
    header: list[str],
    columns: ColumnNames,
    sample: Sample | None = None,
    *,
    roles: Collection[str] = tuple(ROLES),
    required: Collection[str] = (),
    features: Collection[Feature] = (),
) -> dict[str, int]:
    """Where in the header each part is; times and actions are optional unless named, features are not.

    Args:
        path: the file, for messages.
        header: names of all columns; `_` is one that nobody needs.
        columns: what the user named.
        sample: the first values of a column, which may show that it is one of times.
        roles: parts to look for; of one alone, a file of items or users, what is named is only a guess.
        required: parts that are not optional here.
        features: of a schema, to look for by their names.

    Raises:
        DataError: columns are missing (all of them are told), or one that looks like time would go unused.
    """
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    chosen: dict[str, int] = {}
    missing: dict[str, str | None] = {}
    alone = next(iter(roles)) if len(roles) == 1 else None
    for name, role in ROLES.items():
        if name not in roles:
            continue
        wanted: str | None = getattr(columns, name)
        guesses = role.usual_names
        if alone:
            wanted, guesses = (wanted if wanted in header else None), (*guesses, "id")
        usual = [plain.index(guess) for guess in guesses if guess in plain]
        if wanted and wanted in header:
            chosen[name] = header.index(wanted)
        elif wanted is None and usual:
            chosen[name] = usual[0]
        elif wanted or not role.optional or name in required:
            missing[name] = wanted
    places = {feature.name: _place_of(feature, header, plain) for feature in features}
    missing |= {feature.name: feature.input_name for feature in features if places[feature.name] is None}
    if missing:
        raise _no_columns(path, missing, header, alone, getattr(columns, alone) if alone else None)
    found = chosen | {name: place for name, place in places.items() if place is not None}
    _check_unique(path, header, chosen, found)
    if "time" in roles and "time" not in chosen and columns.time is None:
        _check_no_time_unused(path, header, set(found.values()), sample or (lambda column: []))
    return found


def _place_of(feature: Feature, header: list[str], plain: list[str]) -> int | None:
    """Where the column of a feature is: under its very name, else under one that differs in case or marks."""
    if feature.input_name in header:
        return header.index(feature.input_name)
    alike = re.sub(r"[^a-z0-9]", "", feature.input_name.lower())
    return plain.index(alike) if alike in plain else None


def _check_unique(path: Path, header: list[str], chosen: dict[str, int], found: dict[str, int]) -> None:
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {path} cannot play two parts",
            got=", ".join(f"{name}: {header[place]!r}" for name, place in chosen.items()),
            allowed=_columns_there(header),
            next_step="name another column for one of them (`--user`, `--item`, `--time`, `--action`)",
        )
    for role, place in found.items():
        if header.count(header[place]) > 1:
            raise DataError(
                f"{path} has several columns named {header[place]!r}: which is the {role}?",
                got=excerpt(", ".join(header)),
                next_step="give each column a name of its own in the first line",
            )


def _check_no_time_unused(path: Path, header: list[str], used: set[int], sample: Sample) -> None:
    unused = [n for n, name in enumerate(header) if n not in used and name != IGNORED]
    found = [header[n] for n in unused if looks_like_time(header[n], sample(n))]
    if found:
        raise DataError(
            f"{path} has a column that looks like time, and none is used: histories would be in file order",
            got=", ".join(map(repr, found)),
            allowed="a time column by name, or none on purpose",
            next_step=f"`--time {found[0]}` orders events by it; `freescale prepare --time ''` keeps the file's order",
        )


def _no_columns(
    path: Path, missing: dict[str, str | None], header: list[str], alone: str | None, key: str | None
) -> DataError:
    """All that is missing; `alone` is whose file it is if not of events, which call its ids `key`."""
    got, options = [], []
    for name, wanted in missing.items():
        if name not in ROLES:
            guess = nearest(wanted or name, header)
            got.append(f"{name}: {wanted!r}")
            options.append(f"features.{name}.column" + (f" (did you mean {guess!r}?)" if guess else ""))
            continue
        guesses = (*ROLES[name].usual_names, *(("id",) if alone else ()))
        usual = f"none of the usual names ({', '.join(guesses)})"
        got.append(f"{name}: {wanted!r}" if wanted else f"{name}: {usual}")
        guess = nearest(wanted or name, header)
        if not alone:
            options.append(f"`--{name} NAME`" + (f" (did you mean {guess!r}?)" if guess else ""))
    advice = [f"name the column: {', '.join(options)}"] if options else []
    if alone in missing:
        advice.append(
            f"in its first line call the column of the ids as the events do ({key or alone}), or id"
        )
    next_step = "; ".join(advice)
    if _holds_values(header):
        next_step = (
            "the first line names no columns; if there is no header, name the fields in their order, "
            + (
                f"such as `--{alone}-columns {alone},..."
                if alone
                else "such as `--columns user,item,time,action"
            )
            + "` (`_` ignores one)"
        )
    return DataError(
        f"{path} has no column for the {' and no column for the '.join(missing)}",
        got="; ".join(got),
        allowed=_columns_there(header),
        next_step=next_step,
    )


def _holds_values(header: list[str]) -> bool:
    """Whether a first line looks like an event: it has a number where a name should be."""
    return any(re.fullmatch(r"[+-]?[\d.:/T-]+Z?", name.strip()) for name in header)


def looks_like_header(fields: list[str]) -> bool:
    """Whether fields of a first line are usual names of columns."""
    usual = {name for role in ROLES.values() for name in role.usual_names}
    return any(re.sub(r"[^a-z0-9]", "", field.lower()) in usual for field in fields)


def _columns_there(header: list[str]) -> str:
    return f"the columns there are: {excerpt(', '.join(header))}"
