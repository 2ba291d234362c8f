"""AttentionWork: the tiles of a jagged batch as a list of work for the Triton kernels, longest sequence first.

Tiles of one sequence stand together, so that its keys stay in the cache, and those with most to do come first. All of
it is planned on the CPU from lengths that are known there: nothing waits for the GPU.

A row of the work list:  start of the sequence, its length, number of the tile in it, first number in `pairs`,
end of the full pairs, end of all pairs, tokens before the targets, blocks of bias before the sequence's own
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention_mask import AttentionMask, Ints, tile_pairs
from freescale.kernels.host_memory import on_device

# Bias is kept in blocks of this many rows; every tile size divides it.
BIAS_ROWS = 128

Side = Literal["queries", "keys"]


class WorkList(NamedTuple):
    """Tiles [N, 8] and, under a mask, the numbers of the tiles each one meets."""

    tiles: Tensor
    pairs: Tensor


class PairTiles(NamedTuple):
    """Pairs of tiles, and how their sums by distance go together.

    A tile has rows / columns + 1 rows of such sums, `columns` numbers each. Those of one group belong to the same
    distances: number n of group g to distance g * columns - n.

    Args:
        tiles: a work list whose fourth field is the column tile.
        order: the rows of sums, group by group.
        starts: where each group begins in `order`, and the end.
        first_group: number of the first group; negative where keys ahead of their query are seen.
    """

    tiles: Tensor
    order: Tensor
    starts: Tensor
    first_group: int


class BiasStore(NamedTuple):
    """Room for one number a pair, in blocks of 128 rows.

    A row is as wide as what its block can see, in whole blocks; where a prefix sees everything, all rows are equally
    wide. So the kernels need no table to find a pair.

    Args:
        blocks: [blocks, 2] where a block starts and how wide its rows are.
        rows: [blocks, 3] start and length of its sequence, and its first row.
        size: numbers in all.
        widest: the widest row.
    """

    blocks: Tensor
    rows: Tensor
    size: int
    widest: int


class AttentionWork:
    """Plans of one batch, each made when first asked for and then shared by all layers.

    Args:
        offsets: [B + 1] on the CPU.
        device: where the kernels run.
    """

    def __init__(self, offsets: Tensor, *, device: torch.device) -> None:
        self._starts: Ints = offsets.numpy().astype(np.int64)
        self._lengths = np.diff(self._starts)
        self._device = device
        # Stands for a tensor that a kernel does not use.
        self.nothing = torch.empty(16, device=device)
        # As a token sees it: long sequences count once for each of their tokens.
        self.mean_length = float((self._lengths**2).sum() / max(1, self._lengths.sum()))
        self._order = np.argsort(-self._lengths, kind="stable")
        self._lists: dict[tuple[object, ...], WorkList] = {}
        self._pair_tiles: dict[tuple[object, ...], PairTiles] = {}
        self._stores: dict[bool, BiasStore] = {}
        self._mask_codes: tuple[AttentionMask, Tensor | None] | None = None
        self._seen: tuple[AttentionMask, Tensor] | None = None

    def tiles(self, side: Side, *, block: int, other: int, mask: AttentionMask | None) -> WorkList:
        """Tiles of `block` tokens on one side; `other` is the tile size of the other side."""
        key = (side, block, other if mask is not None else None, mask)
        if key not in self._lists:
            made = self._plain(side, block) if mask is None else self._masked(side, block, other, mask)
            self._lists[key] = WorkList(*map(self._on_device, made))
        return self._lists[key]

    def codes(self, mask: AttentionMask) -> Tensor | None:
        """The mask's segment codes as the kernels read them."""
        if self._mask_codes is None or self._mask_codes[0] is not mask:
            codes = mask.codes()
            on_device = None if codes is None else torch.from_numpy(codes.astype(np.int32)).to(self._device)
            self._mask_codes = (mask, on_device)
        return self._mask_codes[1]

    def seen_pieces(self, mask: AttentionMask) -> Tensor:
        """[blocks of the bias store, pieces as wide as a block is high] 1 where a mask shows anything of a piece.

        Tiles of the attention kernels never cross a piece, so that the bias of other pieces is never read.
        """
        if self._seen is None or self._seen[0] is not mask:
            blocks = self._bias_blocks()
            targets = mask.target_counts(len(self._lengths))
            sides = {"block_rows": BIAS_ROWS, "block_columns": BIAS_ROWS}
            pairs = tile_pairs(mask, self._starts, **sides, targets=targets)
            seen = np.zeros((int(blocks.sum()), int(blocks.max(initial=1))), np.int64)
            seen[(np.cumsum(blocks) - blocks)[pairs.sequence] + pairs.row, pairs.column] = 1
            self._seen = (mask, self._on_device(seen).to(torch.uint8))
        return self._seen[1]

    def bias_store(self, mask: AttentionMask | None) -> BiasStore:
        """Room for the bias of every pair."""
        square = is_square(mask)
        if square not in self._stores:
            blocks = self._bias_blocks()
            sequence, number = _numbered(blocks)
            widths = (blocks[sequence] if square else number + 1) * BIAS_ROWS
            sizes = widths * BIAS_ROWS
            table = np.stack([np.cumsum(sizes) - sizes, widths], axis=1)
            rows = np.stack(
                [self._starts[:-1][sequence], self._lengths[sequence], number * BIAS_ROWS], axis=1
            )
            self._stores[square] = BiasStore(
                blocks=self._on_device(table),
                rows=self._on_device(rows),
                size=int(sizes.sum()),
                widest=int(widths.max(initial=BIAS_ROWS)),
            )
        return self._stores[square]

    def pair_tiles(self, *, rows: int, columns: int, mask: AttentionMask | None) -> PairTiles:
        """Every pair of tiles of which something is seen; `columns` divides `rows`."""
        key = (rows, columns, mask)
        if key not in self._pair_tiles:
            self._pair_tiles[key] = self._paired(rows, columns, mask)
        return self._pair_tiles[key]

    def _plain(self, side: Side, block: int) -> tuple[Ints, Ints]:
        """All tiles in the order of work: queries at the end and keys at the start have most to do."""
        tiles = -(-self._lengths[self._order] // block)
        rank, number = _numbered(tiles)
        if side == "queries":
            number = tiles[rank] - 1 - number
        return self._rows(self._order[rank], number, None), np.zeros(1, np.int32)

    def _masked(self, side: Side, block: int, other: int, mask: AttentionMask) -> tuple[Ints, Ints]:
        mask.check(self._lengths)
        targets = mask.target_counts(len(self._lengths))
        rows, columns = (block, other) if side == "queries" else (other, block)
        pairs = tile_pairs(mask, self._starts, block_rows=rows, block_columns=columns, targets=targets)
        own, met = (pairs.row, pairs.column) if side == "queries" else (pairs.column, pairs.row)
        tiles = -(-self._lengths // block)
        tile = (np.cumsum(tiles) - tiles)[pairs.sequence] + own
        # By tile, full pairs first.
        order = np.lexsort((met, ~pairs.full, tile))
        counts = np.bincount(tile, minlength=int(tiles.sum()))
        full = np.bincount(tile, weights=pairs.full, minlength=int(tiles.sum())).astype(np.int64)
        begin = np.cumsum(counts) - counts
        sequence, number = _numbered(tiles)
        out = self._rows(sequence, number, mask)
        out[:, 3], out[:, 4], out[:, 5] = begin, begin + full, begin + counts
        out[:, 6] -= targets[sequence]
        rank = np.empty(len(self._lengths), np.int64)
        rank[self._order] = np.arange(len(rank))
        by_work = np.lexsort((-counts, rank[sequence]))
        return out[by_work], met[order].astype(np.int32)

    def _rows(self, sequence: Ints, number: Ints, mask: AttentionMask | None) -> Ints:
        out = np.zeros((len(sequence), 8), np.int64)
        out[:, 0] = self._starts[:-1][sequence]
        out[:, 1] = out[:, 6] = self._lengths[sequence]
        out[:, 2] = number
        blocks = self._bias_blocks()
        squares = blocks * blocks if is_square(mask) else blocks * (blocks + 1) // 2
        out[:, 7] = (np.cumsum(squares) - squares)[sequence]
        return out

    def _on_device(self, x: Ints) -> Tensor:
        return on_device(x, self._device)

    def _bias_blocks(self) -> Ints:
        return -(-self._lengths // BIAS_ROWS)

    def _paired(self, rows: int, columns: int, mask: AttentionMask | None) -> PairTiles:
        if mask is None:
            of, number = _numbered(-(-self._lengths // rows))
            met = np.minimum(-(-self._lengths[of] // columns), (number + 1) * (rows // columns))
            tile, column = _numbered(met)
            sequence, row = of[tile], number[tile]
        else:
            targets = mask.target_counts(len(self._lengths))
            pairs = tile_pairs(mask, self._starts, block_rows=rows, block_columns=columns, targets=targets)
            sequence, row, column = pairs.sequence, pairs.row, pairs.column
        out = self._rows(sequence, row, mask)
        out[:, 3] = column
        if mask is not None:
            out[:, 6] -= targets[sequence]
        wide = rows // columns
        group = ((row * wide - column)[:, None] + np.arange(wide + 1)).ravel()
        first = min(0, int(group.min(initial=0)))
        counts = np.bincount(group - first, minlength=1)
        order = np.argsort(group, kind="stable")
        starts = np.concatenate([[0], np.cumsum(counts)])
        return PairTiles(self._on_device(out), self._on_device(order), self._on_device(starts), first)


def is_square(mask: AttentionMask | None) -> bool:
    """Whether some rows see what comes after them, so that the bias store must hold it."""
    return mask is not None and mask.prefix > 0


def _numbered(counts: Ints) -> tuple[Ints, Ints]:
    """For groups of these sizes: the group of every member, and its number inside."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
