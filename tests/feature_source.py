"""A data set with features given as plain dicts: events by user, items and users by id."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from freescale.data import NONE
from freescale.data.columns.lists import Lists
from freescale.data.features.feature_source import ItemFeatures
from freescale.data.schema.feature import Feature, Schema
from freescale.data.schema.reading import checked_schema
from freescale.data.source import Histories, ItemCatalog

Rows = dict[int, dict[str, Any]]


class DictSource:
    """A data set held in dicts; None is what is missing.

    Args:
        words: of the schema.
        events: of every user, oldest first: "item", "time" and features of events.
        items: id -> features.
        users: id -> features.
    """

    name = "dicts"
    features = ("item", "time")

    def __init__(
        self, words: dict[str, Any], events: dict[int, list[dict[str, Any]]], items: Rows, users: Rows
    ) -> None:
        self.schema: Schema = checked_schema(words, where="a test")
        self._events, self._items, self._users = events, items, users
        self._order = sorted(events)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(self._events[user]) for user in self._order], dtype=np.int64)

    @property
    def groups(self) -> np.ndarray:
        return np.array([len(self._order)])

    @property
    def items(self) -> ItemCatalog:
        ids = np.array(sorted(self._items), dtype=np.int64)
        whole = [event["item"] for events in self._events.values() for event in events]
        trained = [event["item"] for events in self._events.values() for event in events[:-2]]
        counts = (np.array([each.count(n) for n in ids]) for each in (whole, trained))
        return ItemCatalog(ids, *counts)

    def read(self, rows: Any) -> Histories:
        users = [self._order[row] for row in rows]
        events = [event for user in users for event in self._events[user]]
        columns = {
            "item": np.array([event["item"] for event in events], dtype=np.int64),
            "time": np.array([event["time"] for event in events], dtype=np.int64),
            **{each.name: self._column(each, events) for each in self.schema.columns()},
        }
        theirs = [self._users[user] for user in users]
        return Histories(
            users=np.array(users, dtype=np.int64),
            offsets=np.cumsum([0, *(len(self._events[user]) for user in users)]).astype(np.int64),
            columns=columns,
            user_columns={each.name: self._column(each, theirs) for each in self.schema.stored("user")},
        )

    @property
    def statistics(self) -> dict[str, dict[str, float]]:
        trained = [event for events in self._events.values() for event in events[:-2]]
        items = [self._items[item] for item in {event["item"] for event in trained}]
        users = [self._users[user] for user in self._order if len(self._events[user]) > 2]
        found: dict[str, dict[str, float]] = {}
        whole = [event for events in self._events.values() for event in events]
        for owner, rows, every in (
            ("event", trained, whole),
            ("request", trained, whole),
            ("item", items, self._items.values()),
            ("user", users, self._users.values()),
        ):
            for each in self.schema.stored(owner):
                if each.kind == "number":
                    known = [float(np.float32(row[each.name])) for row in rows if row[each.name] is not None]
                    mean = sum(known) / len(known) if known else 0.0
                    square = sum((value - mean) ** 2 for value in known) / len(known) if known else 0.0
                    found[each.name] = {"mean": mean, "std": math.sqrt(square) or 1.0}
                elif each.kind == "ids":
                    found[each.name] = {"longest": max([1, *(len(row[each.name]) for row in every)])}
        return found

    def item_features(self) -> ItemFeatures:
        rows = [self._items[item] for item in sorted(self._items)]
        columns = {each.name: self._stored(each, rows) for each in self.schema.stored("item")}
        lists = [each.name for each in self.schema.stored("item") if each.kind == "ids"]
        return ItemFeatures(columns, {name: int(self.statistics[name]["longest"]) for name in lists})

    def known_ids(self, table: str, /) -> None:
        return None

    def _stored(self, feature: Feature, rows: list[dict[str, Any]]) -> Any:
        if feature.kind != "ids":
            return self._column(feature, rows)
        lists = [row[feature.name] for row in rows]
        flat = np.array([value for each in lists for value in each], dtype=np.int64)
        return Lists.of(flat, np.array([len(each) for each in lists], dtype=np.int64))

    def _column(self, feature: Feature, rows: list[dict[str, Any]]) -> np.ndarray:
        values = [row[feature.name] for row in rows]
        if feature.kind == "ids":
            return self._stored(feature, rows).padded(
                np.arange(len(rows)), int(self.statistics[feature.name]["longest"])
            )
        if feature.kind == "vector":
            missing = [math.nan] * (feature.width or 1)
            flat = [missing if value is None else value for value in values]
            return np.array(flat, dtype=np.float32).reshape(len(rows), feature.width)
        if feature.kind == "number":
            return np.array([math.nan if value is None else value for value in values], dtype=np.float32)
        return np.array([NONE if value is None else value for value in values], dtype=np.int64)
