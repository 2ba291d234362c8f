"""Tables as TorchRec saves them: which tensors of a checkpoint belong to which table, and what they mean.

    model.ec.embeddings.item.weight                                   [rows, dim]
    optim.state.ec.embeddings.item.weight.item.momentum1              [rows]  sums of row-wise Adagrad
    ..._managed_collision_modules.item._hash_zch_identities           [rows, 1]  the id that owns a row, -1: nobody
    ..._managed_collision_modules.item._hash_zch_metadata             [rows, 1]  the hour it was last seen
    ..._managed_collision_modules.item._hash_zch_bucket               [1, 1]  parts that probing never leaves

Without identities, a row is the id. What stands before these endings is up to the model and the one who saved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freescale.bridge.dcp_files import load_tensors, tensors_in
from freescale.errors import CheckpointError, nearest

_COLLECTIONS = ("embeddings", "embedding_bags")
_MODULES = "_managed_collision_modules"
NOBODY = -1
"""The identity of a row that no id owns."""


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """Where a checkpoint has a table.

    Args:
        name: of the table.
        weight: name of the tensor with its rows.
        momentum: of that with the sums of row-wise Adagrad.
        identities: of that with the ids that own rows.
        seen: of that with the hour an id was last seen.
        buckets: of that with the number of parts that probing never leaves.
    """

    name: str
    weight: str
    momentum: str | None = None
    identities: str | None = None
    seen: str | None = None
    buckets: str | None = None

    @property
    def tensors(self) -> list[str]:
        """Names of all of them."""
        every = (self.weight, self.momentum, self.identities, self.seen, self.buckets)
        return [name for name in every if name is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsById:
    """The rows of a table that belong to some id.

    Args:
        ids: [N] ascending.
        weight: [N, dim].
        square_sum: [N, 1] sums of row-wise Adagrad; None: not saved.
        seen: [N] larger for ids that were seen later; None: nobody knows.
        num_rows: of the table they are from, with those of nobody.
        num_buckets: parts of it that probing never leaves, where rows have owners.
    """

    ids: Tensor
    weight: Tensor
    square_sum: Tensor | None = None
    seen: Tensor | None = None
    num_rows: int | None = None
    num_buckets: int = 1


def find_tables(names: Iterable[str]) -> dict[str, SavedTable]:
    """The tables among the tensors of a checkpoint, by name.

    Raises:
        CheckpointError: two of them have the same name: it must be told which is meant.
    """
    every = sorted(names)
    found: dict[str, SavedTable] = {}
    for name in every:
        parts = name.split(".")
        if len(parts) < 3 or parts[-1] != "weight" or parts[-3] not in _COLLECTIONS:
            continue
        table = saved_table(parts[-2], name, every)
        if table.name in found:
            raise CheckpointError(
                f"two tables of the checkpoint are called {table.name!r}",
                got=f"{found[table.name].weight}, {name}",
                next_step=f"say which one: --table {table.name}={name}",
            )
        found[table.name] = table
    return found


def saved_table(table: str, weight: str, names: Iterable[str]) -> SavedTable:
    """A table whose rows stand under a name, or under its end, and what else there is of it."""
    every = list(names)
    whole = _ending(weight, every)
    if whole is None:
        close = nearest(weight, every)
        raise CheckpointError(
            f"the checkpoint has no tensor {weight!r} for table {table!r}",
            allowed=f"did you mean {close}?" if close else ", ".join(every[:20]),
        )
    # The optimizer's names are those of the model, without what stands before them in the checkpoint.
    own = whole.split(".")
    tails = [".".join(own[start:]) for start in range(len(own) - 2)]
    theirs = own[-2]
    return SavedTable(
        name=table,
        weight=whole,
        momentum=next((hit for tail in tails if (hit := _ending(f"{tail}.{theirs}.momentum1", every))), None),
        identities=_ending(f"{_MODULES}.{theirs}._hash_zch_identities", every),
        seen=_ending(f"{_MODULES}.{theirs}._hash_zch_metadata", every),
        buckets=_ending(f"{_MODULES}.{theirs}._hash_zch_bucket", every),
    )


def choose_tables(folder: Path, wanted: Mapping[str, str]) -> dict[str, SavedTable]:
    """The tables of a checkpoint: those named, by the names of their weights, or all there are."""
    names = list(tensors_in(folder))
    if wanted:
        return {table: saved_table(table, weight, names) for table, weight in wanted.items()}
    found = find_tables(names)
    if not found:
        raise CheckpointError(
            "the checkpoint holds no table that looks like one of an EmbeddingCollection",
            got=", ".join(names[:10]) or "no tensors",
            next_step="name the tensor of its rows: --table item=NAME",
        )
    return found


def read_rows(folder: Path, table: SavedTable) -> RowsById:
    """All rows of a table that some id owns, into the memory of this process."""
    sizes = tensors_in(folder)
    made = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype) for name in table.tensors}
    load_tensors(folder, made)
    weight = made[table.weight]
    sums = None if table.momentum is None else made[table.momentum].reshape(-1, 1)
    if sums is not None and len(sums) != len(weight):
        raise CheckpointError(
            f"{table.momentum} is not that of row-wise Adagrad, the only state that can be taken over",
            got=tuple(sizes[table.momentum].size) if table.momentum else None,
            allowed=f"({len(weight)},)",
            next_step="leave it out: --without-state",
        )
    if table.identities is None:
        return RowsById(ids=torch.arange(len(weight)), weight=weight, square_sum=sums, num_rows=len(weight))
    identities = made[table.identities].reshape(-1)
    rows = (identities != NOBODY).nonzero().flatten()
    ids, order = identities[rows].sort()
    rows = rows[order]
    if len(ids) and bool((ids[1:] == ids[:-1]).any()):
        twice = int(ids[1:][ids[1:] == ids[:-1]][0])
        raise CheckpointError(f"two rows of table {table.name!r} belong to one id", got=f"id {twice}")
    return RowsById(
        ids=ids,
        weight=weight[rows],
        square_sum=None if sums is None else sums[rows],
        seen=None if table.seen is None else made[table.seen].reshape(-1)[rows].long(),
        num_rows=len(weight),
        num_buckets=1 if table.buckets is None else int(made[table.buckets]),
    )


def _ending(wanted: str, names: Iterable[str]) -> str | None:
    """The one of these names that is, or ends in, the one wanted."""
    hits = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
    if len(hits) > 1 and wanted not in hits:
        raise CheckpointError(
            f"several tensors of the checkpoint end in {wanted}",
            got=", ".join(hits),
            next_step="give the whole name",
        )
    return wanted if wanted in hits else hits[0] if hits else None
