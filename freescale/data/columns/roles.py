"""Which column of raw input plays which part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from freescale.data.excerpt import excerpt
from freescale.errors import DataError, nearest


@dataclass(frozen=True)
class ColumnNames:
    """Which column of csv, inter or parquet input plays which part.

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


ROLES = {
    "user": Role(
        ("user", "userid", "uid"),
        allowed="a whole number of 64 bits, or text; not empty, and no mark of a missing value",
        remedy="correct the input",
        optional=False,
    ),
    "item": Role(
        ("item", "itemid", "iid", "movieid", "productid", "asin", "parentasin"),
        allowed="a whole number of 64 bits, or text; not empty, and no mark of a missing value",
        remedy="correct the input",
        optional=False,
    ),
    "time": Role(
        ("time", "timestamp", "ts", "unixreviewtime"),
        allowed="finite numbers, such as seconds since 1970",
        remedy="correct the input, or set the time column to '' to keep the order of the file",
        optional=True,
    ),
    "action": Role(
        ("action", "rating"),
        allowed="finite numbers, such as a rating",
        remedy="correct the input, or set the action column to '' to leave it out",
        optional=True,
    ),
}


def choose_columns(path: Path, header: list[str], columns: ColumnNames) -> dict[str, int]:
    """Where in the header each part is; times and actions are optional unless named."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    chosen: dict[str, int] = {}
    for name, role in ROLES.items():
        wanted: str | None = getattr(columns, name)
        usual = [plain.index(guess) for guess in role.usual_names if guess in plain]
        if wanted:
            if wanted not in header:
                raise _no_column(path, name, wanted, header)
            chosen[name] = header.index(wanted)
        elif wanted is None and usual:
            chosen[name] = usual[0]
        elif not role.optional:
            raise _no_column(path, name, None, header)
    if len(set(chosen.values())) < len(chosen):
        raise DataError(
            f"One column of {path} cannot play two parts",
            got=", ".join(f"{name}: {header[place]!r}" for name, place in chosen.items()),
            allowed=_columns_there(header),
        )
    return chosen


def _no_column(path: Path, name: str, wanted: str | None, header: list[str]) -> DataError:
    guess = nearest(wanted or name, header)
    return DataError(
        f"{path} has no column for the {name}",
        got=repr(wanted) if wanted else f"none of the usual names ({', '.join(ROLES[name].usual_names)})",
        allowed=_columns_there(header),
        next_step=f"name the {name} column (`--{name}`)" + (f"; did you mean {guess!r}?" if guess else ""),
    )


def _columns_there(header: list[str]) -> str:
    return f"the columns there are: {excerpt(', '.join(header))}"
