"""The same few interactions in every form that raw input comes in, and what must become of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from freescale.data.sources.parquet import ParquetSource

# user, item, rating, time; users 7 and 3 interleave, time is out of order, two events of user 7 tie.
EVENTS = [(7, 10, 5, 100), (3, 20, 4, 50), (7, 30, 3, 90), (3, 10, 2, 60), (7, 40, 1, 100), (3, 30, 5, 40)]
BY_TIME = {3: [30, 20, 10], 7: [30, 10, 40]}
BY_FILE = {3: [20, 10, 30], 7: [10, 30, 40]}


def histories(path: Path, feature: str = "item") -> dict[int, list[Any]]:
    source = ParquetSource(path)
    read = source.read(range(len(source)))
    pieces = np.split(read.columns[feature], read.offsets[1:-1])
    return {int(user): piece.tolist() for user, piece in zip(read.users, pieces)}


def lines(template: str, header: str = "") -> str:
    body = (template.format(user=u, item=i, rating=r, time=t) for u, i, r, t in EVENTS)
    return header + "".join(line + "\n" for line in body)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


TEXT_FORMS = {
    "movielens": ("ratings.dat", lines("{user}::{item}::{rating}::{time}"), BY_TIME),
    "inter": (
        "x.inter",
        lines(
            "{user}\t{item}\t{rating}\t{time}.0",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n",
        ),
        BY_TIME,
    ),
    "pairs": ("x.txt", lines("{user} {item}"), BY_FILE),
    "sequences": ("x.txt", "7 10 30 40\n\n3 20 10\n3 30\n", BY_FILE),
    "csv": ("x.csv", lines("{time},{user},{rating},{item}", "timestamp,userId,rating,movieId\n"), BY_TIME),
}
