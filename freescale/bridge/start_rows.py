"""Rows from elsewhere into the tables of a run, and back: by id, on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.bridge.saved_tables import RowsById
from freescale.embedding import EmbeddingTable, IdMap, LearningIdMap, ShardedEmbedding, gather_ids, learns_ids
from freescale.errors import ConfigError, DataError
from freescale.kernels.rows import find_sorted

_BATCH = 1 << 16
_NAMED = 8


def fill_table(
    embedding: ShardedEmbedding, table: str, id_map: IdMap, rows: RowsById, *, admit_after: int = 1
) -> list[str]:
    """Give ids the rows they have elsewhere; every rank must call it. Returns what should be known of it.

    A map that learns is told of ids in the order they were last seen, oldest first, so that the same ones give way
    first; ids of one batch count as seen in one step before the first.

    Args:
        embedding: holds the table.
        table: its name.
        id_map: from ids to its rows.
        rows: what it starts with.
        admit_after: steps an id must be seen in before it gets a row.

    Raises:
        DataError: the table has another width, or ids find no row of their own: they are named, none is lost.
        ConfigError: the table's optimizer keeps another state.
    """
    held = embedding.tables[table]
    told = _check(table, held, rows)
    if learns_ids(id_map):
        at, local = _meet(embedding, id_map, rows, held, admit_after)
    else:
        at, local = _by_formula(table, id_map, rows, held)
    for first in range(0, len(at), _BATCH):
        part, there = at[first : first + _BATCH], local[first : first + _BATCH].to(held.weight.device)
        held.weight[there] = rows.weight[part].to(held.weight)
        if rows.square_sum is not None:
            held.state["square_sum"][there] = rows.square_sum[part].to(held.state["square_sum"])
    return told


def _check(table: str, held: EmbeddingTable, rows: RowsById) -> list[str]:
    if rows.weight.shape[1] != held.dim:
        raise DataError(
            f"the rows for table {table!r} have another width",
            got=rows.weight.shape[1],
            allowed=held.dim,
            next_step=f"set the width of the table to {rows.weight.shape[1]} (model.dim, or tables.{table}.dim)",
        )
    kept = ", ".join(held.state) or "none"
    if rows.square_sum is not None and list(held.state) != ["square_sum"]:
        raise ConfigError(
            f"the rows for table {table!r} come with the sums of row-wise Adagrad, and its optimizer keeps others",
            got=f"state: {kept}",
            next_step="set embedding.optimizer=rowwise_adagrad, or import without them (--without-state)",
        )
    if rows.square_sum is None and held.state:
        return [f"table {table} starts with rows from elsewhere, its optimizer afresh (state: {kept})"]
    return [f"table {table} starts with {len(rows.ids):,} rows from elsewhere and their state"]


def _meet(
    embedding: ShardedEmbedding, id_map: LearningIdMap, rows: RowsById, held: EmbeddingTable, times: int
) -> tuple[Tensor, Tensor]:
    """Let the map meet all ids; positions among them of those held here, and their local rows."""
    order = torch.arange(len(rows.ids)) if rows.seen is None else rows.seen.argsort(stable=True)
    batches = [order[first : first + _BATCH] for first in range(0, len(order), _BATCH)]
    step = -len(batches) * times
    for batch in batches:
        ids = rows.ids[batch].sort().values
        for _ in range(times):
            id_map.rows(ids, step=step)
            step += 1
    own, there = (each.cpu() for each in id_map.residents())
    at, known = find_sorted(rows.ids, own)
    everybody = gather_ids(own[known], embedding.group)
    if len(everybody) < len(rows.ids):
        lost = rows.ids[~torch.isin(rows.ids, everybody)]
        raise DataError(
            f"{len(lost):,} of {len(rows.ids):,} ids find no row of their own in the table",
            got=", ".join(map(str, lost[:_NAMED].tolist())) + (" ..." if len(lost) > _NAMED else ""),
            next_step="raise embedding.rows or embedding.max_probe (`freescale plan ids` says how far)",
        )
    return at[known], there[known] - held.first_row


def _by_formula(table: str, id_map: IdMap, rows: RowsById, held: EmbeddingTable) -> tuple[Tensor, Tensor]:
    """Positions of the ids whose rows are held here, and their local rows."""
    there = torch.cat([id_map.rows(part) for part in rows.ids.split(_BATCH)] or [rows.ids])
    if len(there.unique()) < len(there):
        raise ConfigError(
            f"ids of table {table!r} share rows, and those from elsewhere have one each",
            got=f"{len(there):,} ids, {len(there.unique()):,} rows",
            next_step="set embedding.id_map=zero_collision, or direct",
        )
    local = there - held.first_row
    at = ((local >= 0) & (local < held.num_rows)).nonzero().flatten()
    return at, local[at]


def rows_by_id(embedding: ShardedEmbedding, table: str, id_map: IdMap) -> RowsById:
    """The other way: what a table of one process has learnt, by id.

    Raises:
        ConfigError: the table is spread over several processes, rows belong to no ids, or the optimizer keeps another
            state than TorchRec can take over.
    """
    held = embedding.tables[table]
    if held.num_rows != id_map.num_rows:
        raise ConfigError(
            f"table {table!r} is spread over several processes, and one of them must hold all of it",
            got=f"{held.num_rows:,} of {id_map.num_rows:,} rows here",
            next_step="load the run in one process, as `freescale export` does",
        )
    if learns_ids(id_map):
        ids, rows = (each.cpu() for each in id_map.residents())
    else:
        ids, rows = _formula_ids(table, id_map)
    return RowsById(
        ids=ids,
        weight=held.weight.detach().cpu()[rows],
        square_sum=held.state["square_sum"].cpu()[rows] if list(held.state) == ["square_sum"] else None,
    )


def _formula_ids(table: str, id_map: IdMap) -> tuple[Tensor, Tensor]:
    """Ids 0 to the last row, where a map is one-to-one."""
    known = getattr(id_map, "ids", None)  # of a map that numbers what occurs
    ids = torch.arange(id_map.num_rows) if known is None else known
    rows = id_map.rows(ids)
    if len(rows.unique()) < len(rows):
        raise ConfigError(
            f"rows of table {table!r} belong to several ids each",
            got=type(id_map).__name__,
            next_step="train with embedding.id_map=direct or zero_collision",
        )
    return ids, rows
