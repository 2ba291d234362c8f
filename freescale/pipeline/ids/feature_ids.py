"""Ids of all features of a batch: which tables they ask, and where the answers go.

    batch.items["artist"]    ┐                           ┌ batch.items["artist.slot"]
    batch.tokens["similar"]  ├─ ids of one table ─ rows ─┤ batch.tokens["similar.slot"]
    batch.samples["country"] ┘   (one call a table)      └ ...

A slot says where the row of an id stands among the unique rows of its table (`data/batches/slots.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from freescale.data import FIRST, NO_ID, NONE, PAD, SLOT, SequenceBatch
from freescale.embedding import IdMap
from freescale.errors import DataError
from freescale.kernels.runtime import on_device

Domain = Literal["tokens", "samples", "items"]


@dataclass(frozen=True)
class IdColumn:
    """A feature that has rows in a table.

    Args:
        name: of the feature, as batches have it.
        domain: which part of a batch has it.
        table: where its rows are.
        several: whether it is a list of values, [n, longest].
    """

    name: str
    domain: Domain
    table: str
    several: bool = False


class FeatureIds:
    """Turns the ids of batches into rows and slots.

    Args:
        columns: features that have rows.
        id_maps: of every table.
    """

    def __init__(self, columns: Iterable[IdColumn], id_maps: Mapping[str, IdMap]) -> None:
        self._columns: dict[str, list[IdColumn]] = {name: [] for name in id_maps}
        for column in columns:
            self._columns[column.table].append(column)
        self._maps = id_maps

    def of(self, *domains: Domain) -> FeatureIds:
        """The same for some parts of a batch, and the tables they ask."""
        kept = [one for column in self._columns.values() for one in column if one.domain in domains]
        tables = {one.table for one in kept}
        return FeatureIds(kept, {name: ids for name, ids in self._maps.items() if name in tables})

    @property
    def tables(self) -> tuple[str, ...]:
        """What is asked, in an order that is the same on every rank."""
        return tuple(self._columns)

    @property
    def columns(self) -> tuple[IdColumn, ...]:
        """Features that have rows, table by table."""
        return tuple(column for columns in self._columns.values() for column in columns)

    def rows(self, batch: SequenceBatch, *, step: int | None = None) -> dict[str, Tensor]:
        """The rows a batch asks of every table, for all its features one after the other."""
        return {table: self._rows(table, batch, step) for table in self._columns}

    def _rows(self, table: str, batch: SequenceBatch, step: int | None) -> Tensor:
        columns = self._columns[table]
        try:
            return self._maps[table].rows(_known_ids(batch, columns), step=step)
        except DataError as error:
            if table == "item":
                raise
            # A map does not know whose it is, and speaks of the table of items.
            raise DataError(
                f"{', '.join(column.name for column in columns)}: {error.what.split(':')[0]}",
                got=error.got,
                allowed=error.allowed,
                next_step=f"set tables.{table}.rows to more than the largest id, or tables.{table}.map=hash with rows",
            ) from None

    def with_slots(
        self, batch: SequenceBatch, inverse: Mapping[str, Tensor], *, device: torch.device
    ) -> SequenceBatch:
        """The batch on its device, with slots beside the ids.

        Args:
            batch: as it came from the loader, on the CPU.
            inverse: of every table, where each of its `rows` stands among the unique ones.
            device: where the model computes.
        """
        slots: dict[Domain, dict[str, Tensor]] = {"tokens": {}, "samples": {}, "items": {}}
        for table, columns in self._columns.items():
            ids = [_of(batch, column) for column in columns]
            # Where as many rows were found as there are ids, none is missing, and nobody has to look.
            whole = len(inverse[table]) == sum(each.numel() for each in ids)
            known = [_Known(each.shape, each.numel(), None) if whole else _known(each) for each in ids]
            parts = inverse[table].split([each.count for each in known])
            for column, each, found in zip(columns, known, parts, strict=True):
                slots[column.domain][column.name + SLOT] = _slots(column, each, found, device)
        moved = batch.to(device, non_blocking=True)
        return (
            moved.with_tokens(**slots["tokens"]).with_samples(**slots["samples"]).with_items(**slots["items"])
        )


def _of(batch: SequenceBatch, column: IdColumn) -> Tensor:
    features: dict[str, Tensor] = getattr(batch, column.domain)
    return features[column.name]


@dataclass(frozen=True)
class _Known:
    """Which ids of a feature are there; `there` is None where all are."""

    shape: torch.Size
    count: int
    there: Tensor | None


def _known(ids: Tensor) -> _Known:
    there = ids.numpy() != NONE
    count = int(np.count_nonzero(there))
    return _Known(ids.shape, count, None if count == there.size else torch.from_numpy(there))


def _known_ids(batch: SequenceBatch, columns: Sequence[IdColumn]) -> Tensor:
    # Most features have no hole, and picking out those that are there costs more than finding that out.
    ids = [_of(batch, column) for column in columns]
    known = [
        each.flatten() if there is None else each[there] for each in ids for there in (_known(each).there,)
    ]
    if len(known) == 1:
        return known[0]
    return torch.cat(known) if known else torch.zeros(0, dtype=torch.int64)


def _slots(column: IdColumn, each: _Known, found: Tensor, device: torch.device) -> Tensor:
    send: Callable[[Tensor], Tensor] = lambda values: on_device(values, device)  # noqa: E731
    found = send(found) + FIRST
    known = each.there
    if known is None:
        return found.view(each.shape)
    empty = torch.full(known.shape, PAD if column.several else NO_ID, dtype=torch.int64)
    if column.several:
        empty[~known.any(1), 0] = NO_ID
    return (
        send(empty)
        .flatten()
        .index_copy(0, send(known.flatten().nonzero().flatten()), found)
        .view(known.shape)
    )
