"""Tables of ours as TorchRec saves its own: its names, its order of rows, its zero-collision identities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freescale.bridge.saved_tables import NOBODY, RowsById, SavedTable
from freescale.bridge.versions import require_torchrec
from freescale.errors import CheckpointError, DataError

_NAMED = 8
_MODULES = "_managed_collision_modules"


def names_of_table(
    table: str, weight: str, *, collision: str | None = None, model: str = "model", optim: str = "optim"
) -> SavedTable:
    """Names as `torch.distributed.checkpoint.save({"model": ..., "optim": ...})` makes them.

    Args:
        table: its name.
        weight: name of its weight in the model, e.g. ec.embeddings.item.weight.
        collision: name of the ManagedCollisionCollection in the model, where rows have owners.
        model: what stands before names of the model; may be empty.
        optim: before those of its fused optimizer.
    """
    parts = weight.split(".")
    if len(parts) < 2 or parts[-1] != "weight":
        raise CheckpointError(
            f"{weight!r} is no name of a weight", allowed="such as ec.embeddings.item.weight"
        )
    modules = None if collision is None else f"{_dotted(model)}{_dotted(collision)}{_MODULES}.{parts[-2]}"
    return SavedTable(
        name=table,
        weight=f"{_dotted(model)}{weight}",
        momentum=f"{_dotted(optim)}state.{weight}.{parts[-2]}.momentum1",
        identities=None if modules is None else f"{modules}._hash_zch_identities",
        seen=None if modules is None else f"{modules}._hash_zch_metadata",
        buckets=None if modules is None else f"{modules}._hash_zch_bucket",
    )


def as_saved(
    names: SavedTable, rows: RowsById, *, num_rows: int, num_buckets: int = 1, max_probe: int = 128
) -> dict[str, Tensor]:
    """The tensors of a table, by the names they are saved under.

    Args:
        names: of its tensors; with identities, rows have owners.
        rows: what is known of each id.
        num_rows: of their table.
        num_buckets: with identities: parts of it that probing never leaves, a multiple of the ranks.
        max_probe: with identities: rows an id may live in.

    Raises:
        DataError: ids that have no place there; they are named.
        FreeScaleError: with identities, where TorchRec, which alone knows where it looks for an id, is not installed.
    """
    if names.identities is None:
        at = _by_number(names.name, rows.ids, num_rows)
    else:
        at = place_ids(rows.ids, num_rows=num_rows, num_buckets=num_buckets, max_probe=max_probe)
    weight = rows.weight.new_zeros(num_rows, rows.weight.shape[1])
    weight[at] = rows.weight
    found = {names.weight: weight}
    if rows.square_sum is not None and names.momentum is not None:
        sums = rows.square_sum.new_zeros(num_rows)
        sums[at] = rows.square_sum[:, 0]
        found[names.momentum] = sums
    if names.identities is not None:
        identities = torch.full((num_rows, 1), NOBODY, dtype=torch.int64)
        identities[at, 0] = rows.ids
        found[names.identities] = identities
    if names.seen is not None and rows.seen is not None:
        seen = torch.full((num_rows, 1), NOBODY, dtype=torch.int32)
        seen[at, 0] = rows.seen.int()
        found[names.seen] = seen
    if names.buckets is not None:
        found[names.buckets] = torch.tensor([[num_buckets]])
    return found


def _by_number(table: str, ids: Tensor, num_rows: int) -> Tensor:
    """Where rows have no owners, the row is the id."""
    strange = ids[(ids < 0) | (ids >= num_rows)]
    if len(strange):
        raise DataError(
            f"ids of table {table!r} are no numbers of rows, as they must be where rows have no owners",
            got=_some(strange),
            allowed=f"0 to {num_rows - 1}",
            next_step="give rows owners: --collision NAME of the ManagedCollisionCollection",
        )
    return ids


def place_ids(ids: Tensor, *, num_rows: int, num_buckets: int = 1, max_probe: int = 128) -> Tensor:
    """[N] where TorchRec's zero-collision table looks for each id, as if they had been met in this order.

    Where it begins to look is asked of TorchRec itself, by looking ids up in an empty table.
    """
    if num_rows % num_buckets:
        raise DataError(
            "rows must be a multiple of the buckets", got=f"{num_rows} rows, {num_buckets} buckets"
        )
    if bool((ids == NOBODY).any()):
        raise DataError(f"id {NOBODY} cannot be kept: it stands for a row that nobody owns")
    module = _empty_module(num_rows, num_buckets, max_probe)
    home = _looked_up(module, ids)
    bucket_rows = num_rows // num_buckets
    first = home // bucket_rows * bucket_rows
    owner = torch.full((num_rows,), NOBODY, dtype=torch.int64)
    at = torch.full_like(ids, NOBODY)
    waiting = torch.arange(len(ids))
    for distance in range(min(max_probe, bucket_rows)):
        if not len(waiting):
            break
        slot = first[waiting] + (home[waiting] - first[waiting] + distance) % bucket_rows
        wanted = waiting[owner[slot] == NOBODY]
        free = slot[owner[slot] == NOBODY]
        owner[free.flip(0)] = wanted.flip(0)  # of those who want the same row, the first gets it
        got = owner[free] == wanted
        at[wanted[got]] = free[got]
        waiting = waiting[at[waiting] == NOBODY]
    if len(waiting):
        raise DataError(
            f"{len(waiting):,} of {len(ids):,} ids find no row in a table of {num_rows:,}",
            got=_some(ids[waiting]),
            next_step="raise --rows, or max_probe on both sides",
        )
    _check_found(module, ids, at)
    return at


def _empty_module(num_rows: int, num_buckets: int, max_probe: int) -> Any:
    require_torchrec()
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    module = HashZchManagedCollisionModule(
        zch_size=num_rows, device=torch.device("cpu"), total_num_buckets=num_buckets, max_probe=max_probe
    )
    return module.eval()


def _looked_up(module: Any, ids: Tensor) -> Tensor:
    from torchrec.sparse.jagged_tensor import JaggedTensor

    feature = JaggedTensor(values=ids.long(), lengths=torch.ones_like(ids, dtype=torch.int64))
    found: Mapping[str, Any] = module.remap({"ids": feature})
    rows: Tensor = found["ids"].values().long()
    return rows


def _check_found(module: Any, ids: Tensor, at: Tensor) -> None:
    """TorchRec itself must find every id where it was put."""
    with torch.no_grad():
        module._hash_zch_identities.fill_(NOBODY)
        module._hash_zch_identities[at, 0] = ids
    wrong = _looked_up(module, ids) != at
    if bool(wrong.any()):
        raise CheckpointError(
            "TorchRec looks for ids elsewhere than where its own lookups said",
            got=f"{int(wrong.sum())} of {len(ids)}, the first {_some(ids[wrong])}",
        )


def _dotted(prefix: str) -> str:
    return f"{prefix}." if prefix else ""


def _some(ids: Tensor) -> str:
    return ", ".join(map(str, ids[:_NAMED].tolist())) + (" ..." if len(ids) > _NAMED else "")
