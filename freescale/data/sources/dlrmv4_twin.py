"""A made-up log of a service for music, with the tables, lengths and hot ids of MLPerf's DLRMv4 at a chosen scale.

    data.source=dlrmv4_twin data.path=dlrmv4_twin data.scale=0.001

A thousand users are a thousandth of the benchmark's, with histories of full length; see `_twin_listener` for what is
known of them and what is assumed. What is played is listened to, or skipped: `listened` is what a model learns, and who
knew the odds that the data was made by would have an AUC of 0.80 (`true_odds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.features.feature_source import ItemFeatures
from freescale.data.features.feature_statistics import Statistics
from freescale.data.pools import PoolIndex, PoolRule
from freescale.data.schema.feature import Schema
from freescale.data.schema.reading import checked_schema
from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.data.sources._twin_listener import (
    DAY_S,
    LISTENED,
    SKIPPED,
    Listener,
    World,
    make_listener,
    num_events,
)
from freescale.errors import DataError
from freescale.jagged import offsets_of
from freescale.registry import option, register

Columns = dict[str, npt.NDArray[np.generic]]
NAME = "dlrmv4_twin"
CROSS_ROWS = {
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}
"""Of the benchmark itself."""
FULL_USERS = 1_000_000
_ITEMS_A_USER, _ALBUMS_A_USER, _ARTISTS_A_USER = 9.390624, 3.367692, 1.293395
_LEAST_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class TwinOptions:
    """Keys of a recipe's section `data`; see TwinSource."""

    scale: float = option(
        0.001, help="share of the benchmark's users, items, artists and rows of crosses that there are"
    )
    length_scale: float = option(1.0, help="factor of the lengths of histories, above 0 and at most 1")
    days: int = option(300, help="days of the log, at least 2")


class TwinSource:
    """The twin: a SequenceSource, FeatureSource and IndexedSource whose users are made when first asked for, then kept.

    Args:
        num_users: items, albums, artists and rows of crosses are the benchmark's, divided alike.
        length_scale: factor of the lengths of histories.
        days: of the log.
        seed: makes another log of the same kind.
    """

    name = NAME
    features: tuple[str, ...] = ("item", "time")

    def __init__(
        self, *, num_users: int = 1000, length_scale: float = 1.0, days: int = 300, seed: int = 0
    ) -> None:
        if num_users < 2 or not 0 < length_scale <= 1 or days < 2:
            raise DataError(
                "the twin cannot be made",
                got=f"{num_users} users, length_scale={length_scale}, days={days}",
                allowed="users (1,000,000 x scale) and days from 2 on, length_scale above 0 and at most 1",
            )
        self.world = World(
            seed=seed,
            num_users=num_users,
            num_items=max(_LEAST_ROWS, round(num_users * _ITEMS_A_USER)),
            num_albums=max(_LEAST_ROWS // 3, round(num_users * _ALBUMS_A_USER)),
            num_artists=max(_LEAST_ROWS // 9, round(num_users * _ARTISTS_A_USER)),
            days=days,
        )
        self._lengths = num_events(num_users, scale=length_scale)
        self._made: dict[int, Listener] = {}
        self._pools: dict[PoolRule, PoolIndex] = {}
        self.schema = _schema(num_users)
        self.statistics: Statistics = {}

    @property
    def lengths(self) -> IntArray:
        """[rows] number of events of each history."""
        return self._lengths

    @property
    def groups(self) -> IntArray:
        """Every user can be made alone."""
        return np.ones(len(self._lengths), np.int64)

    @cached_property
    def items(self) -> ItemCatalog:
        """The items that occur; makes all users."""
        counts = np.zeros(self.world.num_items, np.int64)
        held_back = np.zeros_like(counts)
        for user in range(self.world.num_users):
            item = self._listener(user).item
            counts += np.bincount(item, minlength=len(counts))
            held_back += np.bincount(item[-2:], minlength=len(counts))
        there = np.flatnonzero(counts)
        return ItemCatalog(there + 1, counts[there], (counts - held_back)[there])

    def known_ids(self, table: str) -> IntArray | None:
        """Artists and albums are numbered."""
        sizes = {
            "artist": self.world.num_artists,
            "album": self.world.num_albums,
            "user": self.world.num_users,
        }
        return np.arange(1, sizes[table] + 1) if table in sizes else None

    def item_features(self) -> ItemFeatures:
        """Artist and album of every item that occurs."""
        columns = {"artist": self.world.artist_of + 1, "album": self.world.album_of + 1}
        return ItemFeatures(columns, {}).of(self.items.ids - 1)

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""
        rows = np.asarray(rows, dtype=np.int64)
        offsets = offsets_of(self._lengths[rows])
        columns = _columns([self._listener(row) for row in rows.tolist()])
        return Histories(users=rows + 1, offsets=offsets, columns=columns)

    @cached_property
    def offsets(self) -> IntArray:
        """[rows + 1] where histories begin among all events."""
        return offsets_of(self._lengths)

    def events(self, rows: IntArray, places: IntArray, offsets: IntArray) -> Histories:
        """The events at these places among all events, as histories of these rows; makes all users."""
        columns = {name: column[places] for name, column in self._all.items()}
        return Histories(users=np.asarray(rows, np.int64) + 1, offsets=offsets, columns=columns)

    def pools(self, rule: PoolRule) -> PoolIndex:
        """Where the events of each kind stand among all events; makes all users."""
        if rule not in self._pools:
            self._pools[rule] = PoolIndex(self._all[rule.column], self.offsets, rule)
        return self._pools[rule]

    @cached_property
    def _all(self) -> Columns:
        """Of all users, one after the other: a batch of long histories takes a few of their events from here."""
        return _columns([self._listener(row) for row in range(self.world.num_users)])

    def true_odds(self, rows: Sequence[int] | IntArray) -> npt.NDArray[np.float64]:
        """[events] of these rows, one after the other: how likely each was to be listened to, were it played."""
        return np.concatenate([self._listener(row).odds for row in np.asarray(rows).tolist()])

    def _listener(self, user: int) -> Listener:
        if user not in self._made:
            self._made[user] = make_listener(self.world, user, int(self._lengths[user]))
        return self._made[user]


@register("source", NAME, options=TwinOptions)
def make_twin(path: str, options: TwinOptions, *, seed: int) -> TwinSource:
    """The twin of these sizes; it is made up, so there is no path to read."""
    if path not in (NAME, "synthetic"):
        raise DataError(f"{NAME} is read from nowhere", got=f"data.path={path}", allowed=NAME)
    return TwinSource(
        num_users=round(options.scale * FULL_USERS),
        length_scale=options.length_scale,
        days=options.days,
        seed=seed,
    )


def _columns(listeners: Sequence[Listener]) -> Columns:
    """What is known of the events of these users, one after the other."""
    time = _joined([each.time for each in listeners])
    action = _joined([each.action for each in listeners])
    played = (action == LISTENED) | (action == SKIPPED)
    return {
        "item": _joined([each.item for each in listeners]) + 1,
        "time": time,
        "action": action,
        "organic": _joined([each.organic for each in listeners]),
        "hour": time % DAY_S // 3600,
        "listened": np.where(played, action == LISTENED, np.nan).astype(np.float32),
    }


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _schema(num_users: int) -> Schema:
    hours = [str(hour) for hour in range(24)]
    words: dict[str, Any] = {
        "user": {"of": "user", "is": "id"},
        "item": {"of": "event", "is": "id"},
        "time": {"of": "event", "is": "time"},
        "artist": {"of": "item", "is": "id"},
        "album": {"of": "item", "is": "id"},
        "hour": {"of": "event", "is": "id", "values": hours},
        "organic": {"of": "event", "is": "id", "values": ["recommended", "organic"]},
        "action": {"of": "event", "is": "bits", "names": ["listened", "liked", "skipped"], "outcome": True},
        "listened": {"of": "event", "is": "number", "outcome": True},
    }
    for name, rows in CROSS_ROWS.items():
        scaled = max(_LEAST_ROWS, round(rows * num_users / FULL_USERS))
        words[name] = {"cross": name.split("_x_"), "rows": scaled}
    return checked_schema(words, where="the twin of DLRMv4")
