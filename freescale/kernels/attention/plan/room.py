"""LayoutRoom: how large the lists of a padded batch are, whatever the lengths of its sequences.

A captured step reads lists from fixed places, in fixed sizes. So a padded batch has lists with room for any batch that
fits its tokens; what is not used is a tile of a sequence without tokens, at which a program ends at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from freescale.kernels.attention.mask import Ints

BIAS_ROWS = 128
"""Bias is kept in blocks of this many rows; every tile size divides it."""


class LayoutRoom(NamedTuple):
    """The bounds of a padded batch.

    Args:
        tokens: places for tokens; those behind the last sequence are pads, and belong to none.
        longest: tokens of the longest sequence that may come.
        blocks: pairs of blocks of `BIAS_ROWS` tokens that all sequences may have together; 0: as many as fit.
        long: whether kernels take the tiles that pay for long sequences. Batches that may take each other's place have
            to agree on it, whatever their own lengths.
    """

    tokens: int
    longest: int
    blocks: int = 0
    long: bool = False

    def tiles(self, num_sequences: int, block: int) -> int:
        """Most tiles of `block` tokens that so many sequences have."""
        return min(self.tokens // block + num_sequences, num_sequences * -(-self.longest // block))

    def pairs(self, num_sequences: int, block: int) -> int:
        """Most pairs of tiles, a tile with itself and with those before it in its sequence.

        Pairs grow with the square of a length, so most there are where sequences have one token or all they may have:
        the bound is the straight line between these two. Where it is steeper than a pair a token, most there are where
        all tokens are in long sequences and the others have none.
        """
        most = -(-self.longest // block)
        slope = (most * (most + 1) // 2 - 1) / max(1, (most - 1) * block)
        short = num_sequences if slope < 1 else 0
        by_tokens = short + math.ceil(max(0, self.tokens - short) * slope)
        fitting = min(num_sequences * most * (most + 1) // 2, by_tokens)
        # A block has as many tiles in each direction, and a pair of blocks no more pairs than the product of them.
        return min(fitting, self.blocks * (BIAS_ROWS // block) ** 2) if self.blocks else fitting


def pair_blocks(lengths: Ints) -> int:
    """Pairs of blocks of `BIAS_ROWS` tokens that such sequences have, as `LayoutRoom.blocks` bounds them."""
    blocks = -(-lengths // BIAS_ROWS)
    return int(np.sum(blocks * (blocks + 1) // 2))
