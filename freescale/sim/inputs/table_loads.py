"""Several tables of one workload: how large each is, how wide its rows are, and how many ids a step asks of it.

    item:93906,2048,1,64;artist:12934,2048,1,64;country:200,256,0,1,0.5

A table is NAME:ROWS,BYTES,IDS_PER_TOKEN,IDS_PER_SAMPLE, and where it is another than that of the workload, its Zipf
exponent behind that. `freescale profile` writes the tables of a recipe so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

FORM = "NAME:ROWS,BYTES,IDS_PER_TOKEN,IDS_PER_SAMPLE[,ZIPF], several with ; between them"


@dataclass(frozen=True)
class TableLoad:
    """One table.

    Args:
        name: of the table.
        rows: different ids.
        row_bytes: of a row as it travels.
        ids_per_token: ids that every event of a history asks of it.
        ids_per_sample: further ids a sample asks of it.
        zipf: exponent of the popularity of ids; None: that of the workload.
    """

    name: str
    rows: int
    row_bytes: int
    ids_per_token: float
    ids_per_sample: float
    zipf: float | None = None


def read_tables(text: str) -> tuple[TableLoad, ...]:
    """Tables from their text; none where it is empty.

    Raises:
        ValueError: the text cannot be read.
    """
    found = [_read(part.strip()) for part in text.split(";") if part.strip()]
    names = [table.name for table in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two tables are called {twice[0]!r}")
    return tuple(found)


def write_tables(tables: Iterable[TableLoad]) -> str:
    """Tables as text."""
    return ";".join(
        f"{table.name}:{','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in numbers)}"
        for table in tables
        if (numbers := [value for value in astuple(table)[1:] if value is not None])
    )


def _read(text: str) -> TableLoad:
    name, colon, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    right = colon and name.strip() and len(numbers) in (4, 5) and all(map(math.isfinite, numbers))
    if not right or min(numbers[:2]) < 1 or min(numbers[2:]) < 0:
        raise ValueError(f"allowed: {FORM}, at least one row and byte; got {text!r}")
    rows, width, per_token, per_sample, *zipf = numbers
    return TableLoad(name.strip(), int(rows), int(width), per_token, per_sample, zipf[0] if zipf else None)
