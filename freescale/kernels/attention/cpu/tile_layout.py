"""TileLayout: the tokens of a jagged batch in tiles, level by level, longest sequence first.

Tiles stand in the order: first tile of every sequence, then the second tile of every sequence that has one, and so
on. The sequences that reach level i are then a prefix of every level j <= i, so the keys that level i looks at are
plain views:

    level 0:  A0 B0 C0 D0        row i = 2 attends to    A0 B0 | A1 B1 | A2 B2
    level 1:  A1 B1 C1           as three batched products over views, nothing is gathered or copied
    level 2:  A2 B2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.jagged import offsets_of
from freescale.kernels.attention.reference import NUM_TIME_BUCKETS, TIME_BUCKET_WIDTH


class TilePair(NamedTuple):
    """Query level, key level and the rows of tiles they cover."""

    query_level: int
    key_level: int
    queries: slice
    keys: slice


class TileLayout:
    """Where every token of a jagged batch stands in level-ordered tiles; for batched products.

    Args:
        offsets: [B + 1] on the CPU.
        block: tokens a tile; small tiles waste less on short sequences, large ones make faster products.
        device: where the tensors to be laid out live.
        num_tokens: more than the sequences have where pads stand behind them; they come back as zeros.
    """

    def __init__(
        self,
        offsets: Tensor,
        *,
        block: int | None = None,
        device: torch.device | str = "cpu",
        num_tokens: int | None = None,
    ) -> None:
        starts = offsets.numpy()
        lengths = np.diff(starts)
        device = torch.device(device)
        self.block = block or _best_block(lengths, device)
        self.device = device
        self.num_tokens = int(starts[-1])
        self.num_pads = 0 if num_tokens is None else num_tokens - self.num_tokens
        order = np.argsort(-lengths, kind="stable")
        tiles_sorted = -(-lengths[order] // self.block)
        num_levels = int(tiles_sorted.max(initial=0))
        # tiles_sorted falls, so the number of sequences that reach level i is a search, not a count.
        counts = [int(np.searchsorted(-tiles_sorted, -level, side="left")) for level in range(num_levels)]
        self.level_starts = offsets_of(counts)
        self.counts = counts
        self.num_tiles = int(self.level_starts[-1])
        sequence = np.concatenate([order[:count] for count in counts]) if counts else np.zeros(0, np.int64)
        level = np.repeat(np.arange(num_levels), counts)
        self.lengths, self.sequences, self.levels = lengths, sequence, level
        positions = level[:, None] * self.block + np.arange(self.block)
        real = positions < lengths[sequence][:, None] if counts else np.zeros((0, self.block), bool)
        tokens = np.where(real, starts[:-1][sequence][:, None] + positions, self.num_tokens)
        slot_of_token = np.empty(self.num_tokens + 1, np.int64)
        slot_of_token[tokens.ravel()] = np.arange(tokens.size)
        empty = ~real.ravel()
        self.tokens = torch.from_numpy(np.where(empty, 0, tokens.ravel())).to(device, non_blocking=True)
        self.empty = torch.from_numpy(np.flatnonzero(empty)).to(device, non_blocking=True)
        self.slots = torch.from_numpy(slot_of_token[:-1].copy()).to(device, non_blocking=True)
        self.tile_sequence = torch.from_numpy(sequence).to(device, non_blocking=True)
        self.tile_length = torch.from_numpy(lengths[sequence]).to(device, non_blocking=True)

    def pairs(self, *, ahead: bool = False) -> Iterator[TilePair]:
        """Every (query level, key level) with key level <= query level, by query level; `ahead`: all of them."""
        for i in range(len(self.counts)):
            first = int(self.level_starts[i])
            for j in range(len(self.counts) if ahead else i + 1):
                # Of the sequences of a level, those that reach the other one come first.
                start, count = int(self.level_starts[j]), min(self.counts[i], self.counts[j])
                yield TilePair(i, j, slice(first, first + count), slice(start, start + count))

    def to_tiles(self, x: Tensor) -> Tensor:
        """[T, ...] -> [tiles, block, ...], zeros in the empty slots."""
        slots = _Spread.apply(x, self)  # type: ignore[no-untyped-call]
        return slots.view(self.num_tiles, self.block, *x.shape[1:])

    def to_tokens(self, tiles: Tensor) -> Tensor:
        """[tiles, block, ...] -> [T, ...]."""
        slots = tiles.reshape(self.num_tiles * self.block, *tiles.shape[2:])
        return _Collect.apply(slots, self)  # type: ignore[no-untyped-call]

    def time_buckets(self, query_time: Tensor, key_time: Tensor) -> tuple[Tensor, ...]:
        """Bucket [n, block, block] of every pair of tiles."""
        query, key = self.to_tiles(query_time), self.to_tiles(key_time)
        return tuple(pair_buckets(query, key, pair) for pair in self.pairs())


class _Spread(torch.autograd.Function):
    """Tokens to slots. Each token has one slot, so the gradient is a plain gather back, not a sum by index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: TileLayout) -> Tensor:
        ctx.layout = layout
        return _spread(x, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(grad, ctx.layout), None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    """Slots to tokens, the other way round."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: TileLayout) -> Tensor:
        ctx.layout = layout
        tokens = slots.index_select(0, layout.slots)
        if not layout.num_pads:
            return tokens
        return torch.cat([tokens, tokens.new_zeros(layout.num_pads, *tokens.shape[1:])])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.layout), None  # type: ignore[no-untyped-call]


def _spread(x: Tensor, layout: TileLayout) -> Tensor:
    if not len(x):
        return x.new_zeros(layout.num_tiles * layout.block, *x.shape[1:])
    return x.index_select(0, layout.tokens).index_fill_(0, layout.empty, 0)


def _best_block(lengths: npt.NDArray[np.int64], device: torch.device) -> int:
    """The tile size with the least predicted time for these lengths."""
    if device.type != "cpu":
        # Launches decide: two levels for short histories, and tiles of 256 fill the GPU for long ones.
        longest = int(lengths.max(initial=1))
        return min(256, max(32, 1 << ((longest - 1) // 2).bit_length()))

    def predicted_us(block: int) -> float:
        tiles = -(-lengths // block)
        # Measured on an Arm server core: 7 us a product however small, 4.4 ns a score with its SiLU.
        return float((tiles * (tiles + 1) // 2).sum()) * (7.0 + 0.0044 * block**2)

    return min((32, 64, 128), key=predicted_us)


def pair_buckets(query_time: Tensor, key_time: Tensor, pair: TilePair) -> Tensor:
    """Bucket [n, block, block] of a pair of tiles; times are laid out as tiles."""
    return _bucket(query_time[pair.queries][:, :, None] - key_time[pair.keys][:, None, :])


def _bucket(delta: Tensor) -> Tensor:
    """`reference.time_bucket`, stored small."""
    logs = torch.log(delta.abs().clamp(min=1).to(torch.float64)).div_(TIME_BUCKET_WIDTH)
    return logs.floor_().clamp_(max=NUM_TIME_BUCKETS - 1).to(torch.int32)
