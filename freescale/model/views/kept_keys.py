"""What views ask of a store of keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from freescale.data import Ints


class KeptKeys(Protocol):
    """Keys and values kept of several users, side by side in one store; `PackedCaches` and `HistoryCaches` are such."""

    @property
    def keys(self) -> Tensor:
        """[layers, N, heads, width]; empty where nobody has any."""

    @property
    def values(self) -> Tensor:
        """The same; their width may differ."""

    @property
    def positions(self) -> Tensor:
        """[N] position of each."""

    @property
    def times(self) -> Tensor | None:
        """[N] time stamp of each."""

    @property
    def starts(self) -> Ints:
        """[users] where those of each begin."""

    @property
    def counts(self) -> Ints:
        """[users] how many each has."""

    @property
    def ends(self) -> Ints:
        """[users] position of the token that follows."""
