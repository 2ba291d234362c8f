"""What a mask hides in pairs of tiles: of causal attention, and of any `MaskRule`, which is asked tile by tile."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.cpu.tile_layout import TileLayout, TilePair, pair_buckets
from freescale.kernels.attention.mask import shared_position
from freescale.kernels.attention.mask_rule import MaskRule, visible


class Buckets(Protocol):
    """Time buckets [n, block, block] of the pairs of tiles, by their number."""

    def __getitem__(self, number: int, /) -> Tensor: ...


class CausalTiles:
    """A token sees itself and all before it: something is hidden only where a tile meets itself.

    Args:
        layout: the tiles.
    """

    def __init__(self, layout: TileLayout) -> None:
        self.pairs = list(layout.pairs())
        square = torch.ones(layout.block, layout.block, dtype=torch.bool, device=layout.device)
        self._later = square.triu(1)

    def hidden(self, pair: TilePair, heads: int) -> Tensor | None:
        """[block, block], true where nothing is seen, for all tiles and `heads` alike; None where all of it is."""
        return self._later if pair.query_level == pair.key_level else None

    def distances(self, pair: TilePair) -> None:
        """None: tokens stand one after the other."""


class RuleTiles:
    """What a rule shows of a batch, worked out anew whenever a pair of tiles is asked for: nothing quadratic is kept.

    Args:
        rule: the mask.
        layout: the tiles; the attributes of the rule are laid out like them.
    """

    def __init__(self, rule: MaskRule, layout: TileLayout) -> None:
        self._rule, self._layout = rule, layout
        self._per_token = {
            name: layout.to_tiles(values.to(layout.device)) for name, values in rule.per_token.items()
        }
        self._per_sequence = {
            name: values.to(layout.device).index_select(0, layout.tile_sequence)
            for name, values in rule.per_sequence.items()
        }
        self._inside = torch.arange(layout.block, device=layout.device)
        shared = shared_position(rule, layout.lengths)
        # [tiles] where the targets of a tile's sequence stand, and whether a level has any.
        self._shared: Tensor | None = None
        self._has_targets: list[bool] = []
        if shared is not None:
            of_tile = shared[layout.sequences]
            self._shared = torch.from_numpy(of_tile).to(layout.device)
            ends = np.minimum(layout.lengths[layout.sequences], (layout.levels + 1) * layout.block)
            beyond = np.bincount(layout.levels, weights=ends > of_tile, minlength=len(layout.counts))
            self._has_targets = (beyond > 0).tolist()

    @cached_property
    def pairs(self) -> list[TilePair]:
        """Pairs of tiles in which something is seen; the rule is asked for all of them once a batch to find these."""
        candidates = list(self._layout.pairs(ahead=self._rule.looks_ahead))
        if not candidates:
            return []
        # Read back together: one wait for the device, not one a pair.
        shown = torch.stack([self._seen(pair).any() for pair in candidates]).tolist()
        return [pair for pair, some in zip(candidates, shown) if some]

    def hidden(self, pair: TilePair, heads: int) -> Tensor:
        """[tiles * heads, block, block], true where nothing is seen."""
        return ~self._seen(pair).repeat_interleave(heads, dim=0)

    def distances(self, pair: TilePair) -> Tensor | None:
        """[tiles, block, block] how far back keys stand, where targets share a position; None where there are none."""
        if self._shared is None or not self._has_targets[pair.query_level]:
            return None
        block, most = self._layout.block, self._shared[pair.queries][:, None, None]
        i = torch.minimum((pair.query_level * block + self._inside)[None, :, None], most)
        j = torch.minimum((pair.key_level * block + self._inside)[None, None, :], most)
        return (i - j).clamp_(min=0)

    def time_buckets(self, query_time: Tensor, key_time: Tensor) -> Buckets:
        """Buckets of time between query and key, worked out when a pair is asked for."""
        return _TimeBuckets(self.pairs, self._layout.to_tiles(query_time), self._layout.to_tiles(key_time))

    def _seen(self, pair: TilePair) -> Tensor:
        """[tiles, block, block]."""
        block, rows, columns = self._layout.block, pair.queries, pair.keys
        return visible(
            self._rule,
            (pair.query_level * block + self._inside)[None, :, None],
            (pair.key_level * block + self._inside)[None, None, :],
            length=self._layout.tile_length[rows][:, None, None],
            query={name: values[rows][:, :, None] for name, values in self._per_token.items()},
            key={name: values[columns][:, None, :] for name, values in self._per_token.items()},
            sequence={name: values[rows][:, None, None] for name, values in self._per_sequence.items()},
        )


class _TimeBuckets:
    """Buckets of pairs from times laid out as tiles."""

    def __init__(self, pairs: list[TilePair], query_time: Tensor, key_time: Tensor) -> None:
        self._pairs, self._query_time, self._key_time = pairs, query_time, key_time

    def __getitem__(self, number: int, /) -> Tensor:
        return pair_buckets(self._query_time, self._key_time, self._pairs[number])
