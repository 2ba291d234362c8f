"""One listener of the DLRMv4 twin: all events of a user, made from (seed, user) alone.

Every draw is the n-th number of a stream of its own, keyed by seed, user and field: any user can be made alone and in
any order, and event n of a field does not depend on what other fields draw.

Told of a service for music (Yambda, as the benchmark of MLPerf uses it) and kept here: how many events users have
(Gamma(0.65), mean 4,765), what they are (listened to, skipped, liked, other), 300 days in ticks of 5 seconds, sessions
with at least half an hour between them. Assumed: Zipf's law over items, six listens of ten repeat one of the user's,
a daily rhythm, and a taste that decides what is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.source import IntArray

Floats = npt.NDArray[np.float64]

LISTENED, LIKED, SKIPPED = 1, 2, 4
"""Bits of an action; other events have none."""
TICK_S = 5
SESSION_GAP_S = 1800
DAY_S = 86_400
FIRST_DAY = 19_000 * DAY_S
"""Midnight in UTC, when the log begins."""

_SHAPE, _SCALE, _MOST = 0.65, 7450.0, 27_738
_SKIP_MEAN, _SKIP_CONCENTRATION = 0.369, 3.6
_LIKE_SHAPE, _LIKE_MEAN, _LIKE_MOST = 0.35, 0.011, 0.5
_OTHER = 0.01
_REPEAT = 0.6
_ORGANIC = 0.6
_TASTE_DIM = 4
_TASTE, _QUALITY, _HOUR, _ORGANIC_LIFT = 1.0, 0.5, 0.25, 0.25
STRENGTH = 0.55
"""How much taste, quality, hour and way there count beside the habit: who knows the odds has an AUC of 0.80 by it."""
_SESSION_EVENTS = (10, 41)
_RHYTHM_S = 3 * 3600

# Fields: one stream of draws each.
_HABITS, _SESSIONS, _DAYS, _GAPS, _FRESH, _ITEM, _WHICH, _TYPE, _LABEL, _WAY, _VECTOR = range(11)
_FIELDS = 16
_WORLD = 1 << 40
"""Where a user's number would stand, for what all users share."""


def num_events(num_users: int, *, scale: float = 1.0) -> IntArray:
    """[users] events of each: quantiles of a Gamma distribution, so that a thousand users do not scatter."""
    lengths = np.minimum(_SCALE * _gamma_quantiles(_SHAPE, num_users), _MOST) * scale
    return np.maximum(np.rint(lengths), 4).astype(np.int64)


def _gamma_quantiles(shape: float, size: int) -> Floats:
    """[size] of a Gamma distribution of scale 1, ascending."""
    wanted = torch.from_numpy((np.arange(size) + 0.5) / size)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, 100.0)
    of = torch.full_like(wanted, shape)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.gammainc(of, middle) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return np.asarray(low.numpy())


@dataclass(frozen=True)
class World:
    """What all users share.

    Args:
        seed: makes another world of the same kind.
        num_users: numbered from 0.
        num_items: numbered from 0, and nested in albums of an artist.
        num_albums: likewise.
        num_artists: likewise.
        days: of the log.
    """

    seed: int
    num_users: int
    num_items: int
    num_albums: int
    num_artists: int
    days: int

    def draws(self, user: int, field: int) -> np.random.Generator:
        """The stream of a field."""
        return np.random.Generator(np.random.Philox(key=[self.seed, user * _FIELDS + field]))

    @cached_property
    def like_rates(self) -> Floats:
        """[users] quantiles of a Gamma distribution, dealt out at random."""
        rates = _gamma_quantiles(_LIKE_SHAPE, self.num_users) * _LIKE_MEAN / _LIKE_SHAPE
        return np.minimum(self.draws(_WORLD, _TYPE).permutation(rates), _LIKE_MOST)

    @cached_property
    def album_of(self) -> IntArray:
        """[items] which album each is of."""
        return np.arange(self.num_items) * self.num_albums // self.num_items

    @cached_property
    def artist_of(self) -> IntArray:
        """[items] whose each is."""
        return self.album_of * self.num_artists // self.num_albums

    @cached_property
    def popularity(self) -> Floats:
        """[items] cumulative shares, the most popular first."""
        shares = np.cumsum(1.0 / np.arange(1, self.num_items + 1))
        return np.asarray(shares / shares[-1])

    @cached_property
    def by_popularity(self) -> IntArray:
        """[items] the most popular first: scattered over albums and artists."""
        return self.draws(_WORLD, _ITEM).permutation(self.num_items)

    @cached_property
    def quality(self) -> Floats:
        """[items] how good each is, to everybody."""
        return self.draws(_WORLD, _LABEL).standard_normal(self.num_items)

    @cached_property
    def artists(self) -> Floats:
        """[artists, 4] what tastes meet."""
        return self.draws(_WORLD, _VECTOR).standard_normal((self.num_artists, _TASTE_DIM))


@dataclass(frozen=True)
class Listener:
    """All events of a user, oldest first.

    Args:
        item: numbered from 0.
        time: seconds since 1970.
        action: LISTENED, LIKED, SKIPPED or 0.
        organic: 1 where the user chose, 0 where it was recommended.
        odds: probability that a track that is played is listened to.
    """

    item: IntArray
    time: IntArray
    action: IntArray
    organic: IntArray
    odds: Floats


def make_listener(world: World, user: int, length: int) -> Listener:
    """All events of a user."""
    habits = world.draws(user, _HABITS)
    skips = habits.beta(_SKIP_MEAN * _SKIP_CONCENTRATION, (1 - _SKIP_MEAN) * _SKIP_CONCENTRATION)
    favourite_hour, swing = habits.random(2)
    skips = min(max(skips, 1e-3), 1 - 1e-3)
    time = _times(world, user, length, favourite_hour)
    item = _items(world, user, length)
    organic = (world.draws(user, _WAY).random(length) < _ORGANIC).astype(np.int64)
    vector = world.draws(user, _VECTOR).standard_normal(_TASTE_DIM)
    taste = world.artists[world.artist_of[item]] @ vector / np.sqrt(_TASTE_DIM)
    hour = np.cos(2 * np.pi * ((time % DAY_S) / DAY_S - swing))
    lift = _TASTE * taste + _QUALITY * world.quality[item] + _HOUR * hour + _ORGANIC_LIFT * (2 * organic - 1)
    odds = 1 / (1 + np.exp(-(np.log((1 - skips) / skips) + STRENGTH * lift)))
    kind = world.draws(user, _TYPE).random(length)
    listened = world.draws(user, _LABEL).random(length) < odds
    action = np.where(listened, LISTENED, SKIPPED)
    action = np.where(kind < _OTHER + world.like_rates[user], LIKED, action)
    action = np.where(kind < _OTHER, 0, action).astype(np.int64)
    return Listener(item, time, action, organic, odds)


def _times(world: World, user: int, length: int, favourite_hour: float) -> IntArray:
    """Sessions over the days of the log, most of them about the user's hour; ticks inside."""
    sizes = world.draws(user, _SESSIONS).integers(*_SESSION_EVENTS, size=length // _SESSION_EVENTS[0] + 1)
    ends = np.cumsum(sizes)
    num_sessions = int(np.searchsorted(ends, length)) + 1
    first = np.append(0, ends[: num_sessions - 1])
    gaps = TICK_S * world.draws(user, _GAPS).integers(2, 49, size=length)
    gaps[first] = 0
    inside = np.cumsum(gaps)
    duration = np.diff(np.append(inside[first], inside[-1] + gaps[-1]))
    draws = world.draws(user, _DAYS)
    day = draws.integers(world.days, size=num_sessions)
    start = day * DAY_S + DAY_S * favourite_hour + _RHYTHM_S * draws.standard_normal(num_sessions)
    start = np.sort(np.rint(start.clip(0, world.days * DAY_S) / TICK_S).astype(np.int64) * TICK_S)
    # None begins sooner than half an hour after the one before it has ended.
    needed = np.append(0, np.cumsum(duration + SESSION_GAP_S + TICK_S)[:-1])
    start = np.maximum.accumulate(start - needed) + needed
    session = np.searchsorted(first, np.arange(length), side="right") - 1
    return np.asarray(FIRST_DAY + start[session] + inside - inside[first][session], np.int64)


def _items(world: World, user: int, length: int) -> IntArray:
    """New ones by popularity; others repeat an earlier event of the user."""
    fresh = world.draws(user, _FRESH).random(length) >= _REPEAT
    fresh[0] = True
    drawn = np.searchsorted(world.popularity, world.draws(user, _ITEM).random(length))
    place = np.arange(length)
    earlier = (world.draws(user, _WHICH).random(length) * place).astype(np.int64)
    source = np.where(fresh, place, earlier)
    while not np.array_equal(source, source[source]):
        source = source[source]
    return np.asarray(world.by_popularity[drawn[source]], np.int64)
