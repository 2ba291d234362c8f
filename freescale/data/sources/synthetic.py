"""The embedded data set: long-tailed lengths, Zipf ids, and a planted taste that a sequence model can find.

Items fall into genres. A user starts in one genre and moves on now and then; while there, most events are items of
that genre, and the next item tends to be one of the few successors of the current one. The rest is popularity noise.
So popularity alone does badly, the genre of recent items does better, and the order of items does best.

With features the same can be seen in them: an item says its genre, a user's country says which genres he likes, and an
event says how long he stayed, which is longer where his taste was met; see `_synthetic_features`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.data.columns.lists import Column
from freescale.data.features.feature_source import ItemFeatures
from freescale.data.features.feature_statistics import FeatureStatistics, Statistics
from freescale.data.schema.feature import legacy_schema
from freescale.data.source import Histories, IntArray, ItemCatalog
from freescale.data.sources._synthetic_features import (
    SyntheticFeatures,
    draw_countries,
    genre_at_home,
    make_features,
)
from freescale.errors import DataError
from freescale.jagged import offsets_of, spans
from freescale.registry import register

_ITEMS_PER_GENRE = 25
_NUM_SUCCESSORS = 3
_STAY_IN_GENRE = 0.95
_FOLLOW_SUCCESSOR = 0.6


class SyntheticSource:
    """Histories made up from a seed, held in memory; implements SequenceSource.

    Args:
        num_users: number of histories.
        num_items: number of items; ids are 1 to num_items.
        mean_length: mean events a history.
        sigma: spread of the log-normal lengths.
        max_length: longest history.
        zipf: exponent of the popularity of the events that follow no taste.
        preference: share of events that follow the user's taste.
        with_features: also features of events, items and users; users of one country then like the same genres.
        seed: makes another data set of the same kind.
    """

    name = "synthetic"
    features: tuple[str, ...] = ("item", "time")

    def __init__(
        self,
        *,
        num_users: int = 3000,
        num_items: int = 1500,
        mean_length: float = 30.0,
        sigma: float = 1.0,
        max_length: int = 400,
        zipf: float = 1.0,
        preference: float = 0.8,
        with_features: bool = False,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng([seed, 7])
        raw = rng.lognormal(np.log(mean_length) - sigma**2 / 2, sigma, num_users)
        self._lengths = np.clip(raw.round(), 4, max_length).astype(np.int64)
        self._offsets = offsets_of(self._lengths)
        self._num_items = num_items
        country = draw_countries(seed, num_users) if with_features else None
        walk = _plant(
            rng, self._lengths, num_items=num_items, zipf=zipf, preference=preference, country=country
        )
        gaps = rng.lognormal(6.0, 2.0, int(self._offsets[-1])).astype(np.int64)
        self._columns: dict[str, npt.NDArray[np.generic]] = {
            "item": walk.items,
            "time": _times(gaps, self._offsets),
        }
        self.schema = legacy_schema(self.features)
        self.statistics: Statistics = {}
        self._user_columns: dict[str, npt.NDArray[np.generic]] = {}
        self._item_columns: dict[str, Column] = {}
        if country is not None:
            made = make_features(
                seed, self._columns, country=country, genre_of=walk.genre_of, tasteful=walk.tasteful
            )
            self._columns |= made.events
            self._user_columns, self._item_columns = made.users, made.items
            self.schema, self.statistics = made.schema, self._measure(made)

    @property
    def lengths(self) -> IntArray:
        """[rows] number of events of each history."""
        return self._lengths

    @property
    def groups(self) -> IntArray:
        """All rows are equally cheap to read: one group."""
        return np.array([len(self._lengths)])

    @cached_property
    def items(self) -> ItemCatalog:
        """The items that occur."""
        item = self._columns["item"].astype(np.int64, copy=False)
        held_back = np.concatenate([self._offsets[1:] - 1, self._offsets[1:] - 2])
        counts = np.bincount(item, minlength=self._num_items + 1)
        train_counts = counts - np.bincount(item[held_back], minlength=self._num_items + 1)
        ids = np.flatnonzero(counts)
        return ItemCatalog(ids=ids, counts=counts[ids], train_counts=train_counts[ids])

    def known_ids(self, table: str) -> IntArray | None:
        """Ids of events and users are closed lists."""
        return None

    def item_features(self) -> ItemFeatures:
        """What is known of the items."""
        longest = {name: int(self.statistics[name]["longest"]) for name in ("genres",) if name in self.schema}
        return ItemFeatures(self._item_columns, longest).of(self.items.ids - 1)

    def _measure(self, made: SyntheticFeatures) -> Statistics:
        """Of the training part: without the last two events of every user."""
        train = np.ones(int(self._offsets[-1]), dtype=bool)
        train[self._offsets[1:] - 1] = False
        train[self._offsets[1:] - 2] = False
        found = FeatureStatistics(made.schema)
        found.add(made.events, train)
        found.add(made.users, np.ones(len(self._lengths), dtype=bool))
        rows = self.items.ids - 1
        columns = {name: column[rows] for name, column in made.items.items()}
        found.add(columns, self.items.train_counts > 0)
        return found.result()

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""
        rows = np.asarray(rows, dtype=np.int64)
        index, offsets = spans(self._offsets[:-1][rows], self._lengths[rows])
        columns = {name: values[index] for name, values in self._columns.items()}
        users = {name: values[rows] for name, values in self._user_columns.items()}
        return Histories(users=rows + 1, offsets=offsets, columns=dict(columns), user_columns=users)


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """The keys of a recipe's section `synthetic`; see SyntheticSource."""

    users: int = 3000
    items: int = 1500
    mean_length: float = 30.0
    sigma: float = 1.0
    max_length: int = 400
    zipf: float = 1.0
    preference: float = 0.8
    features: bool = False


@register("source", "synthetic", options=SyntheticOptions)
def make_synthetic(path: str, options: SyntheticOptions, *, seed: int) -> SyntheticSource:
    """The data set of these sizes; it is made up, so there is no path to read."""
    if path != "synthetic":
        raise DataError(
            "the synthetic data set is read from nowhere", got=f"data.path={path}", allowed="synthetic"
        )
    return SyntheticSource(
        num_users=options.users,
        num_items=options.items,
        mean_length=options.mean_length,
        sigma=options.sigma,
        max_length=options.max_length,
        zipf=options.zipf,
        preference=options.preference,
        with_features=options.features,
        seed=seed,
    )


class _Walk(NamedTuple):
    """All events of all users: their items, whether each met its user's taste; and the genre of every item."""

    items: IntArray
    tasteful: npt.NDArray[np.bool_]
    genre_of: IntArray


def _plant(
    rng: np.random.Generator,
    lengths: IntArray,
    *,
    num_items: int,
    zipf: float,
    preference: float,
    country: IntArray | None,
) -> _Walk:
    """One walk a user, all users advanced together, longest first; where a user has a country, in its genres."""
    num_genres = max(2, num_items // _ITEMS_PER_GENRE)
    genre_of = rng.permutation(np.arange(num_items) % num_genres)
    by_genre = np.argsort(genre_of, kind="stable")
    first = np.searchsorted(genre_of[by_genre], np.arange(num_genres + 1))
    successors = _successors(rng, genre_of, by_genre, first)
    noise = _zipf_weights(num_items, zipf)
    noise_items = rng.permutation(num_items)
    order = np.argsort(-lengths, kind="stable")
    starts = offsets_of(lengths)[:-1][order]
    events = np.empty(int(lengths.sum()), dtype=np.int64)
    tasteful_events = np.zeros(len(events), dtype=bool)
    genre = rng.integers(num_genres, size=len(lengths))
    home = None if country is None else country[order]
    if home is not None:
        genre = genre_at_home(genre, home, num_genres)
    current = by_genre[first[genre]]
    for t in range(int(lengths.max())):
        alive = int(np.searchsorted(-lengths[order], -t, side="left"))
        u = rng.random((4, alive))
        moved = rng.integers(num_genres, size=alive)
        if home is not None:
            moved = genre_at_home(moved, home[:alive], num_genres)
        genre[:alive] = np.where(u[0] < _STAY_IN_GENRE, genre[:alive], moved)
        size = first[genre[:alive] + 1] - first[genre[:alive]]
        in_genre = by_genre[first[genre[:alive]] + (u[1] ** 2 * size).astype(np.int64)]
        follow = (u[2] < _FOLLOW_SUCCESSOR) & (genre_of[current[:alive]] == genre[:alive])
        following = successors[current[:alive], rng.integers(_NUM_SUCCESSORS, size=alive)]
        popular = noise_items[np.searchsorted(noise, rng.random(alive))]
        tasteful = np.where(follow, following, in_genre)
        current[:alive] = np.where(u[3] < preference, tasteful, popular)
        events[starts[:alive] + t] = current[:alive] + 1
        tasteful_events[starts[:alive] + t] = u[3] < preference
    return _Walk(events, tasteful_events, genre_of)


def _successors(
    rng: np.random.Generator, genre_of: IntArray, by_genre: IntArray, first: IntArray
) -> IntArray:
    """[items, 3] the items that like to come next, all of the same genre."""
    size = first[genre_of + 1] - first[genre_of]
    draw = rng.random((len(genre_of), _NUM_SUCCESSORS))
    return by_genre[first[genre_of][:, None] + (draw * size[:, None]).astype(np.int64)]


def _zipf_weights(num_items: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Cumulative probabilities of a Zipf law."""
    weights = np.arange(1, num_items + 1) ** -exponent
    cumulative = np.cumsum(weights)
    return cumulative / cumulative[-1]


def _times(gaps: IntArray, offsets: IntArray) -> IntArray:
    """Time stamps that rise inside each history."""
    total = np.cumsum(gaps)
    return total - np.repeat(total[offsets[:-1]], np.diff(offsets)) + 1_600_000_000
