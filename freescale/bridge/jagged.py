"""What the bridge needs of TorchRec's jagged tensors, as stand-ins for where TorchRec is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Jagged(Protocol):
    """One feature of a batch: values of all samples, end to end, and how many each sample has."""

    def values(self) -> Tensor:
        """[T] or [T, dim]."""

    def lengths(self) -> Tensor:
        """[B]."""


class Keyed(Protocol):
    """Several features of a batch by name, as a KeyedJaggedTensor."""

    def keys(self) -> Sequence[str]:
        """Names of the F features."""

    def __getitem__(self, key: str) -> Jagged:
        """One of them."""

    def values(self) -> Tensor:
        """[T] ids, those of the first feature first."""

    def lengths(self) -> Tensor:
        """[F * B] of every sample, in the same order."""

    def weights_or_none(self) -> Tensor | None:
        """[T] a weight for each id, where there are any."""


class JaggedFeature:
    """A stand-in for torchrec's JaggedTensor.

    Args:
        values: of all samples, end to end.
        lengths: [B] of each sample.
    """

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        """Of all samples, end to end."""
        return self._values

    def lengths(self) -> Tensor:
        """[B] of each sample."""
        return self._lengths


class KeyedFeatures:
    """A stand-in for torchrec's KeyedJaggedTensor: feature after feature in one tensor of values.

    Args:
        keys: names of the F features.
        values: [T] ids, those of the first feature first.
        lengths: [F * B] of every sample, in the same order.
        weights: [T] a weight for each id.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys, self._values, self._lengths, self._weights = list(keys), values, lengths, weights
        per_key = lengths.view(len(self._keys), -1)
        counts: list[int] = per_key.sum(1).tolist()
        self._parts = dict(
            zip(self._keys, zip(torch.split(values, counts), per_key, strict=True), strict=True)
        )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Of all features, end to end."""
        return self._values

    def lengths(self) -> Tensor:
        """Of all features, end to end."""
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        """Of all features, end to end."""
        return self._weights

    def __getitem__(self, key: str) -> JaggedFeature:
        """One of them."""
        return JaggedFeature(*self._parts[key])
