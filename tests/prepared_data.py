"""Small prepared data sets that differ in one thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.writing import dataset_writer
from freescale.data.stored.manifest import DATASET_FILE

Histories = list[list[int]]


def made_up(num_users: int = 60) -> Histories:
    """Histories of 8 items each: nothing but the items tells one from another."""
    return np.random.default_rng(3).integers(1, 50, (num_users, 8)).tolist()


def in_another_order(histories: Histories) -> Histories:
    """The first two users change places."""
    return [histories[1], histories[0], *histories[2:]]


def with_other_items(histories: Histories) -> Histories:
    """A tenth of the users has its items in another order, so that all counts stay as they are."""
    return [
        history[:-3] + history[-3:][::-1] if n % 10 == 0 else history for n, history in enumerate(histories)
    ]


def with_other_lengths(histories: Histories) -> Histories:
    """One event of one user belongs to the next: as many events, as many users."""
    return [histories[0][:-1], [histories[0][-1], *histories[1]], *histories[2:]]


def with_another_item(histories: Histories) -> Histories:
    """One event is of another item."""
    return [[77, *histories[0][1:]], *histories[1:]]


CHANGES: dict[str, tuple[Callable[[Histories], Histories], str]] = {
    "order": (in_another_order, r"what is in shard-00000\.parquet"),
    "items": (with_other_items, r"what is in shard-00000\.parquet and"),
    "lengths": (with_other_lengths, "the lengths of the histories"),
    "catalogue": (with_another_item, "items: 49 .*, 50 "),
    "fewer": (lambda histories: histories[:-1], "histories: 60 .*, 59 "),
}
"""What is changed, and how it is told."""


def write_dataset(folder: Path, histories: Histories) -> Path:
    """Prepared from one line a user, in several shards."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    raw = folder.with_suffix(".txt")
    raw.write_text("".join(f"{user} {' '.join(map(str, items))}\n" for user, items in enumerate(histories)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_writer, "_ROW_GROUP_USERS", 8)
        patch.setattr(dataset_writer, "_SHARD_BYTES", 600)
        prepare(raw, folder, format="sequences", overwrite=True)
    return folder


def forget_digests(folder: Path) -> Path:
    """As data sets were before there were any."""
    file = folder / DATASET_FILE
    manifest = json.loads(file.read_text())
    manifest.pop("catalogue")
    for shard in manifest["shards"]:
        shard.pop("digest")
    file.write_text(json.dumps(manifest))
    return folder
