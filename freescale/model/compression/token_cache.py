"""TokenCache: one user's history as the keys and values of its summary tokens, all that serving needs of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from freescale.errors import DataError

_FORMAT = "freescale-token-cache-1"


@dataclass(frozen=True, kw_only=True)
class CacheStamp:
    """What a cache must agree on with the model that reads it.

    Args:
        model: fingerprint of the weights; keys and values of other weights mean nothing.
        length: events of a segment.
        summaries: summary tokens a segment.
        dtype: of keys and values.
    """

    model: str
    length: int
    summaries: int
    dtype: str

    def refuse_other(self, other: CacheStamp) -> None:
        """Complain about everything in which another stamp differs."""
        mine, theirs = asdict(self), asdict(other)
        different = {name: (theirs[name], value) for name, value in mine.items() if theirs.get(name) != value}
        if different:
            raise DataError(
                "this token cache was made by another model",
                got=", ".join(f"{name} {theirs}" for name, (theirs, _) in different.items()),
                allowed=", ".join(f"{name} {mine}" for name, (_, mine) in different.items()),
                next_step="compress the user's history again with the model that serves",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCache:
    """The compressed history of one user.

    Args:
        keys: [layers, segments * summaries, heads, width].
        values: the same; their width may differ.
        sizes: events of each segment.
        times: time stamp of each segment's last event; empty where there are none.
        stamp: which model made it.
    """

    keys: Tensor
    values: Tensor
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    stamp: CacheStamp

    @property
    def num_events(self) -> int:
        """Events that are compressed in here."""
        return sum(self.sizes)

    @property
    def end(self) -> int:
        """Position of the event that follows."""
        return self.num_events + self.stamp.summaries * len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def positions(self) -> tuple[int, ...]:
        """Position of every summary."""
        return _positions(self.sizes, self.stamp.summaries)

    def first(self, segments: int) -> TokenCache:
        """The cache of the first segments only: they do not depend on later ones."""
        tokens = self.stamp.summaries * segments
        return replace(
            self,
            keys=self.keys[:, :tokens],
            values=self.values[:, :tokens],
            sizes=self.sizes[:segments],
            times=self.times[:segments],
        )

    def whole_segments(self) -> TokenCache:
        """The cache without a last segment that is shorter than others: its events are to be compressed again."""
        short = bool(self.sizes) and self.sizes[-1] < self.stamp.length
        return self.first(len(self.sizes) - 1) if short else self

    def extended(self, more: TokenCache) -> TokenCache:
        """This history and the segments that came after it."""
        return replace(
            self,
            keys=torch.cat([self.keys, more.keys], dim=1),
            values=torch.cat([self.values, more.values], dim=1),
            sizes=self.sizes + more.sizes,
            times=self.times + more.times,
        )

    def to(self, device: torch.device | str) -> TokenCache:
        """The cache on another device."""
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))

    def to_bytes(self) -> bytes:
        """The cache for a store, in the safetensors format; reading it runs no code."""
        from safetensors.torch import save

        facts = {"format": _FORMAT, "sizes": self.sizes, "times": self.times, "stamp": asdict(self.stamp)}
        tensors = {"keys": self.keys.cpu().contiguous(), "values": self.values.cpu().contiguous()}
        return save(tensors, metadata={"cache": json.dumps(facts)})

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenCache:
        """The cache a store gave back."""
        from safetensors.torch import load

        try:
            facts = _facts(data)
            tensors = load(data)
            cache = cls(
                keys=tensors["keys"],
                values=tensors["values"],
                sizes=tuple(facts["sizes"]),
                times=tuple(facts["times"]),
                stamp=CacheStamp(**facts["stamp"]),
            )
        except Exception as error:
            raise DataError("these bytes are no token cache", got=str(error).split("\n")[0]) from error
        wanted = len(cache.sizes) * cache.stamp.summaries
        if cache.keys.shape[1] != wanted or cache.values.shape[:3] != cache.keys.shape[:3]:
            raise DataError("these bytes are no token cache", got=f"{cache.keys.shape[1]} of {wanted} tokens")
        return cache


@lru_cache(maxsize=4096)
def _positions(sizes: tuple[int, ...], summaries: int) -> tuple[int, ...]:
    """Many users share few patterns of segments, and a request should not count them out again."""
    found: list[int] = []
    end = 0
    for size in sizes:
        end += size + summaries
        found += range(end - summaries, end)
    return tuple(found)


def _facts(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["cache"])
    if facts.get("format") != _FORMAT:
        raise ValueError(f"format {facts.get('format')!r}, expected {_FORMAT!r}")
    found: dict[str, Any] = facts
    return found
