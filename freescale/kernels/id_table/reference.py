"""The plain truth of the id kernels: one id after the other, in ordinary Python.

What a batch of ids does to a table:

1. Every id that has a slot keeps it, and counts as used now.
2. The others, one after the other, take the first empty slot of their windows.
3. Those that found none, smallest first, take over the slot with the lowest score in their windows (the first such in
   probe order), unless it was used lately or its score is not below the threshold. Then they go without a slot.

Rule 2 goes through the ids in the order they stand. A GPU cannot: there, the smallest id goes first. Ids that stand in
ascending order, as training passes them in, come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from freescale.kernels.id_table.layout import EMPTY, SlotLayout


def window(layout: SlotLayout, id_: int) -> Iterator[int]:
    """Rows an id may live in, in probe order; none if its bucket is not held here."""
    one = torch.tensor([id_])
    bucket = int(layout.bucket(one)) - layout.first_bucket
    home = int(layout.home(one))
    if 0 <= bucket < layout.held_buckets and id_ != EMPTY:
        for step in range(layout.max_probe):
            yield bucket * layout.bucket_rows + (home + step) % layout.bucket_slots


def find(ids: Tensor, identity: Tensor, layout: SlotLayout) -> Tensor:
    """Row of every id, -1 where it has none; stops at the first empty slot."""
    rows = []
    for id_ in ids.tolist():
        row = -1
        for candidate in window(layout, id_):
            key = int(identity[candidate])
            if key in (id_, EMPTY):
                row = candidate if key == id_ else -1
                break
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


def claim(ids: Tensor, identity: Tensor, layout: SlotLayout) -> tuple[Tensor, Tensor]:
    """Rules 1 and 2: rows of all ids, -1 where the window is full, and the rows that were empty before."""
    new_rows = []
    for id_ in ids.tolist():
        for candidate in window(layout, id_):
            key = int(identity[candidate])
            if key == id_:
                break
            if key == EMPTY:
                identity[candidate] = id_
                new_rows.append(candidate)
                break
    return find(ids, identity, layout), torch.tensor(new_rows, dtype=torch.int64)


def evict(
    ids: Tensor,
    identity: Tensor,
    used: Tensor,
    score: Tensor,
    layout: SlotLayout,
    *,
    now: int,
    safe_from: int,
    threshold: int,
    blank: int,
) -> tuple[Tensor, Tensor]:
    """Rule 3 for distinct ids without a slot, ascending: the row each one took, or -1, and the id that had it."""
    rows, gone = [], []
    for id_ in ids.tolist():
        best = -1
        for candidate in window(layout, id_):
            free = int(used[candidate]) < safe_from and int(score[candidate]) < threshold
            if free and (best < 0 or int(score[candidate]) < int(score[best])):
                best = candidate
        rows.append(best)
        gone.append(int(identity[best]) if best >= 0 else EMPTY)
        if best >= 0:
            identity[best], used[best], score[best] = id_, now, blank
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(gone, dtype=torch.int64)


def touch(rows: Tensor, used: Tensor, score: Tensor, values: Tensor, *, now: int, mode: str) -> None:
    """Mark rows as used now; scores rise to the value ("max"), grow by it once a batch ("add") or become it ("set")."""
    for n, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        value = int(values[n if len(values) > 1 else 0])
        if mode == "max":
            score[row] = max(int(score[row]), value)
        elif mode == "set":
            score[row] = value
        elif int(used[row]) != now:
            score[row] += value
        used[row] = now
