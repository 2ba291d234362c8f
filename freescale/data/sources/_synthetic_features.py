"""Features of the embedded data set, in which its planted taste can be seen.

country   of a user: genres are dealt out to countries, and nine moves in ten lead to one of his country's
genre     of an item, and `genres`: the same and sometimes a neighbour
price     of an item: genres have price levels; missing for some
hour      of an event, from its time
watched   of an event, an outcome: longer where the user's taste was met; missing now and then
action    of an event, an outcome: view, and like or share where it was watched long
home      country x genre
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from freescale.data.columns.lists import Column, Lists
from freescale.data.schema.feature import Schema
from freescale.data.schema.reading import checked_schema
from freescale.data.source import IntArray

COUNTRIES = ("de", "fr", "in", "us")
_AT_HOME = 9
"""Of ten moves, so many lead to a genre of the user's country."""
_MISSING = 0.05

_WORDS = {
    "user": {"of": "user", "is": "id"},
    "item": {"of": "event", "is": "id"},
    "time": {"of": "event", "is": "time"},
    "country": {"of": "user", "is": "id", "values": list(COUNTRIES)},
    "genre": {"of": "item", "is": "id"},
    "genres": {"of": "item", "is": "ids", "table": "genre"},
    "price": {"of": "item", "is": "number", "scale": "log"},
    "hour": {"of": "event", "is": "id", "values": [str(hour) for hour in range(24)]},
    "watched": {"of": "event", "is": "number", "scale": "standard", "outcome": True},
    "action": {"of": "event", "is": "bits", "names": ["view", "like", "share"], "outcome": True},
    "home": {"cross": ["country", "genre"], "rows": 1000},
}


class SyntheticFeatures(NamedTuple):
    """Columns of events, users and items (by id - 1), and what they are."""

    schema: Schema
    events: dict[str, npt.NDArray[np.generic]]
    users: dict[str, npt.NDArray[np.generic]]
    items: dict[str, Column]


def draw_countries(seed: int, num_users: int) -> IntArray:
    """[users] a country each; a stream of its own, so that data without features is what it always was."""
    return np.random.default_rng([seed, 11]).integers(len(COUNTRIES), size=num_users)


def genre_at_home(genre: IntArray, country: IntArray, num_genres: int) -> IntArray:
    """Genres as drawn, nine of ten exchanged for a neighbour that the country likes."""
    first = genre - genre % len(COUNTRIES)
    liked = np.where(first + country < num_genres, first + country, country % num_genres)
    # The draw itself says which tenth it belongs to.
    return np.where((genre * 7 + first) % 10 < _AT_HOME, liked, genre)


def make_features(
    seed: int,
    columns: dict[str, npt.NDArray[np.generic]],
    *,
    country: IntArray,
    genre_of: IntArray,
    tasteful: npt.NDArray[np.bool_],
) -> SyntheticFeatures:
    """All features.

    Args:
        seed: of the data set.
        columns: items and times of all events.
        country: of every user.
        genre_of: every item.
        tasteful: whether an event met its user's taste.
    """
    rng = np.random.default_rng([seed, 13])
    num_items, num_events = len(genre_of), len(tasteful)
    second = rng.random(num_items) < 0.3
    pairs = np.stack([genre_of, (genre_of + 1) % (int(genre_of.max()) + 1)], axis=1)
    genres = Lists.of(
        pairs[np.stack([np.ones(num_items, dtype=bool), second], axis=1)], 1 + second.astype(np.int64)
    )
    price = np.exp(genre_of % 5 + rng.normal(0, 0.3, num_items)).astype(np.float32)
    price[rng.random(num_items) < _MISSING] = np.nan
    watched = rng.lognormal(np.where(tasteful, 4.0, 2.0), 0.5).astype(np.float32)
    long = watched > 40
    action = 1 + 2 * (long & (rng.random(num_events) < 0.5)) + 4 * (long & (rng.random(num_events) < 0.1))
    watched[rng.random(num_events) < _MISSING] = np.nan
    time = columns["time"].astype(np.int64, copy=False)
    return SyntheticFeatures(
        schema=checked_schema(_WORDS, where="the synthetic data set"),
        events={
            "hour": time // 3600 % 24,
            "watched": watched,
            "action": action.astype(np.int64),
        },
        users={"country": country},
        items={"genre": genre_of.astype(np.int64), "genres": genres, "price": price},
    )
