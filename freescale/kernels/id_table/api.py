"""Find ids in a table of slots, give new ones a slot, take slots over: on the CPU by loops, on a GPU by Triton.

`probe_reference` says what must come out. For ids in ascending order both give exactly that, row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.id_table.layout import EMPTY, SlotLayout


def find(ids: Tensor, identity: Tensor, layout: SlotLayout) -> Tensor:
    """Row of every id, -1 where it has none. Reads only, so any number of threads may call it at once."""
    if ids.is_cuda:
        from freescale.kernels.id_table.triton import probe as probe_triton

        return probe_triton.find(ids, identity, layout)
    rows = torch.full_like(ids, -1)
    if layout.held_buckets == 0:
        return rows
    from freescale.kernels.id_table import loops as probe_loops

    probe_loops.find(ids.numpy(), identity.numpy(), layout.numbers, rows.numpy())
    return rows


def claim(
    ids: Tensor, identity: Tensor, occupied: Tensor | None, layout: SlotLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Give every id a slot that has one or finds one empty: rows, -1 where the window is full; the new rows and ids.

    Args:
        ids: any int64; they are placed in the order they stand, on a GPU smallest first.
        identity: who lives in each row held here.
        occupied: on a GPU: one bit a row (`occupied_bits`), set for every id that is there; new bits are set here.
        layout: of the table.
    """
    if ids.is_cuda:
        from freescale.kernels.id_table.triton import probe as probe_triton

        assert occupied is not None
        rows, new = probe_triton.claim(ids, identity, occupied, layout)
        return rows, rows[new], ids[new]
    if layout.held_buckets == 0:
        return torch.full_like(ids, -1), ids[:0], ids[:0]
    from freescale.kernels.id_table import loops as probe_loops

    rows, new_rows, new_ids = (torch.empty_like(ids) for _ in range(3))
    count = probe_loops.claim(
        ids.numpy(), identity.numpy(), layout.numbers, rows.numpy(), new_rows.numpy(), new_ids.numpy()
    )
    return rows, new_rows[:count], new_ids[:count]


def claim_rows(
    ids: Tensor, identity: Tensor, occupied: Tensor | None, layout: SlotLayout
) -> tuple[Tensor, int]:
    """The same, but of the new rows only how many there are: on a GPU, to list them takes as long as to make them."""
    if not ids.is_cuda:
        rows, new_rows, _ = claim(ids, identity, occupied, layout)
        return rows, len(new_rows)
    from freescale.kernels.id_table.triton import probe as probe_triton

    assert occupied is not None
    rows, new = probe_triton.claim(ids, identity, occupied, layout)
    return rows, int(new.sum())


def share(ids: Tensor, rows: Tensor, layout: SlotLayout) -> int:
    """Where an id has no row (-1), fill in the overflow row it shares (`SlotLayout.overflow`); how many those are."""
    if ids.is_cuda:
        from freescale.kernels.id_table.triton import share as share_triton

        return share_triton.share(ids, rows, layout)
    from freescale.kernels.id_table import loops as probe_loops

    return int(probe_loops.share(ids.numpy(), layout.numbers, layout.overflow_rows, rows.numpy()))


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
    """Distinct ids, ascending, take over slots: the row of each, or -1 where none may be taken; and who had it.

    Args:
        ids: ids that `claim` found no slot for, each once, ascending.
        identity: who lives in each row.
        used: the batch each row was used in last.
        score: the lowest goes first.
        layout: of the table.
        now: number of this batch.
        safe_from: rows used in this batch or a later one stay.
        threshold: rows with this score or a higher one stay.
        blank: score of a row just taken over.
    """
    if ids.is_cuda:
        from freescale.kernels.id_table.triton import probe as probe_triton

        return probe_triton.evict(ids, identity, used, score, layout, now, safe_from, threshold, blank)
    from freescale.kernels.id_table import loops as probe_loops

    rows, gone = torch.empty_like(ids), torch.empty_like(ids)
    probe_loops.evict(
        ids.numpy(),
        identity.numpy(),
        used.numpy(),
        score.numpy(),
        layout.numbers,
        (now, safe_from, threshold, blank),
        rows.numpy(),
        gone.numpy(),
    )
    return rows, gone


def touch(rows: Tensor, used: Tensor, score: Tensor, values: Tensor, *, now: int, mode: str) -> None:
    """Mark rows (-1: none) as used in batch `now`; their scores rise to, grow by (once a batch) or become the values.

    Args:
        rows: may repeat; equal rows must come with equal values.
        used: the batch each row was used in last.
        score: changed in place.
        values: one for each row, or a single one for all.
        now: number of this batch.
        mode: "max", "add" or "set".
    """
    if rows.is_cuda:
        from freescale.kernels.id_table.triton import touch as probe_touch

        probe_touch.touch(rows, used, score, values, now, mode)
        return
    from freescale.kernels.id_table import loops as probe_loops

    probe_loops.touch(rows.numpy(), used.numpy(), score.numpy(), values.numpy(), now, probe_loops.MODES[mode])


def occupied_bits(identity: Tensor) -> Tensor:
    """The bits `claim` needs, from the ids that are there: int32 words, bit r % 32 of word r // 32 is row r."""
    taken = torch.nn.functional.pad(identity != EMPTY, (0, -len(identity) % 32)).view(-1, 32)
    bits = taken.long() << torch.arange(32, device=identity.device)
    return bits.sum(1).to(torch.int32)
