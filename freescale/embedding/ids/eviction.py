"""Who gives way when a window is full: each policy is a score a row, and the lowest score goes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from freescale.errors import ConfigError, DataError

Mode = Literal["max", "add", "set"]
LAST = torch.iinfo(torch.int64).max
FIRST = torch.iinfo(torch.int64).min


class Eviction(Protocol):
    """A policy: what a use does to a row's score, and which scores may go."""

    @property
    def name(self) -> str:
        """Name in recipes and statistics."""

    @property
    def mode(self) -> Mode:
        """A use raises the score to a value, adds a value once a batch, or sets it."""

    def values(self, ids: Tensor, *, now: int, ttl: Tensor | int | None) -> Tensor:
        """The values for these ids, or a single one for all."""

    def threshold(self, now: int) -> int:
        """Rows with this score or a higher one stay."""


@dataclass(frozen=True)
class TTL:
    """An id that was not seen for `ttl` units of time may go; what expired first goes first.

    Args:
        ttl: time to live, in the unit of `now`; a call may bring its own, one for all its ids or one for each
            (features with times of their own).
    """

    ttl: int
    name: str = "ttl"
    mode: Mode = "max"

    def __post_init__(self) -> None:
        if self.ttl < 1:
            raise ConfigError(
                "a time to live is at least one unit of time", got=self.ttl, allowed="1 or more"
            )

    def values(self, ids: Tensor, *, now: int, ttl: Tensor | int | None) -> Tensor:
        """When each id expires."""
        if ttl is None or isinstance(ttl, int):
            return ids.new_full((1,), now + (self.ttl if ttl is None else ttl))
        if ttl.shape != ids.shape:
            raise DataError("one time to live for each id", got=f"{len(ttl)} for {len(ids)} ids")
        return ttl.to(ids.device).long() + now

    def threshold(self, now: int) -> int:
        """What has expired."""
        return now + 1


@dataclass(frozen=True)
class LRU:
    """The id that was seen least recently goes."""

    name: str = "lru"
    mode: Mode = "max"

    def values(self, ids: Tensor, *, now: int, ttl: Tensor | int | None) -> Tensor:
        """Seen now."""
        return ids.new_full((1,), now)

    def threshold(self, now: int) -> int:
        """Any."""
        return LAST


@dataclass(frozen=True)
class LFU:
    """The id that was seen in the fewest batches goes."""

    name: str = "lfu"
    mode: Mode = "add"

    def values(self, ids: Tensor, *, now: int, ttl: Tensor | int | None) -> Tensor:
        """Seen once more."""
        return ids.new_ones(1)

    def threshold(self, now: int) -> int:
        """Any."""
        return LAST


@dataclass(frozen=True)
class ByScore:
    """The id with the lowest score of your own goes.

    Args:
        score: (ids, now) -> one int64 for each id, asked whenever ids are used.
    """

    score: Callable[[Tensor, int], Tensor]
    name: str = "score"
    mode: Mode = "set"

    def values(self, ids: Tensor, *, now: int, ttl: Tensor | int | None) -> Tensor:
        """The user's scores."""
        scores = self.score(ids, now)
        if scores.shape != ids.shape:
            raise DataError(
                "the score function gives one number for each id",
                got=f"{tuple(scores.shape)} for {len(ids)} ids",
            )
        return scores.to(ids.device).long()

    def threshold(self, now: int) -> int:
        """Any."""
        return LAST


def check_policy(eviction: Eviction) -> None:
    """Refuse what is no policy: a name, or a class that was not called."""
    if isinstance(eviction, type) or not hasattr(eviction, "mode"):
        raise ConfigError(
            "eviction is no policy",
            got=repr(eviction),
            allowed="None, TTL(ttl), LRU(), LFU(), ByScore(score)",
            next_step="from freescale.embedding import LRU, then eviction=LRU()",
        )


def make_eviction(name: str, *, ttl: int | None = None) -> Eviction | None:
    """The policy of that name in a recipe."""
    if name == "none":
        return None
    if name == "ttl":
        if ttl is None:
            raise ConfigError("eviction by time to live needs one", next_step="set embedding.ttl=STEPS")
        return TTL(ttl)
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    raise ConfigError("unknown eviction policy", got=name, allowed="none, ttl, lru, lfu")
