"""Users as equally long rows: attention over caches in plain batched products, where no kernel runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.data import Ints
from freescale.kernels.runtime import to_device


class PaddedHeads(NamedTuple):
    """Attention of new tokens over what is cached, over new events before them, and over themselves.

    A token's own key stands apart: many candidates need no scores of each other.

    Args:
        queries: [users, heads, new tokens, width].
        keys: [users, heads, cached tokens and new events, width].
        values: the same.
        own_keys: those of the new tokens.
        own_values: the same.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    own_keys: Tensor
    own_values: Tensor

    def scores(self) -> Tensor:
        """[users, heads, new tokens, cached tokens, new events and itself]."""
        own = (self.queries * self.own_keys).sum(-1, keepdim=True)
        return torch.cat([self.queries @ self.keys.transpose(2, 3), own], dim=3)

    def weighted(self, weights: Tensor) -> Tensor:
        """Sum of the values under these weights."""
        return weights[..., :-1] @ self.values + weights[..., -1:] * self.own_values


class Padding(NamedTuple):
    """Tokens of several users as equally long rows.

    Args:
        source: [users * longest] the token of each slot; any where there is none.
        slots: [tokens of all users] the slot of each token.
        empty: [users, longest] slots without a token.
        longest: slots of a user.
    """

    source: Tensor
    slots: Tensor
    empty: Tensor
    longest: int

    @staticmethod
    def of(starts: Ints, lengths: Ints, longest: int, device: torch.device) -> Padding:
        """For users whose tokens begin at `starts`."""
        empty = np.arange(longest) >= lengths[:, None]
        source = np.where(empty, 0, starts[:, None] + np.arange(longest)).ravel()
        tables = to_device(source, np.flatnonzero(~empty.ravel()), empty, device=device)
        return Padding(tables[0], tables[1], tables[2], longest)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [users, longest, ...]."""
        return x.index_select(0, self.source).view(*self.empty.shape, *x.shape[1:])
