"""From raw columns to what a batch holds of every feature: buckets, scaled numbers, crosses, marks of what is missing.

    name in a batch     of what                                        who may look at it
    NAME                the event of this token, the user of this
                        sample, or a distinct item of the batch        everybody
    target_NAME         the event that comes next                      everybody: it describes the candidate
    label_NAME          an outcome of the event that comes next        losses and metrics only
    NAME.none           whether a number or vector is missing          as NAME

An outcome is known only after its event. So there is no `target_` of an outcome: what a candidate may see and what it
must not see are told apart by their names.

What is known of items is there once for each distinct item of a batch (`SequenceBatch.items`); "item_index",
"target_index" and "negative_index" point to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.features.cross_hash import cross_ids
from freescale.data.features.feature_source import FeatureSource, schema_of
from freescale.data.features.feature_statistics import Statistics
from freescale.data.schema.feature import STRUCTURAL, Feature, Schema
from freescale.data.schema.vocabulary import NONE
from freescale.data.source import Histories, IntArray, SequenceSource
from freescale.data.stored.item_texts import item_numbers
from freescale.errors import DataError

TARGET, LABEL, MISSING = "target_", "label_", ".none"
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class BatchFeatures:
    """Makes the features of batches; picklable, so that loader processes can hold it.

    Args:
        source: where raw values come from.
        schema: features that are wanted; all columns they need must be in the source.
        left_out: features of events that nobody looks at but crosses in front: batches do not carry them.
    """

    source: SequenceSource
    schema: Schema
    left_out: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        there = schema_of(self.source)
        missing = [
            each.name
            for each in self.schema
            if not each.cross and each.name not in there and each.name != "user"
        ]
        if missing:
            raise DataError(
                f"the data set {self.source.name} has no such features",
                got=", ".join(missing),
                allowed=", ".join(each.name for each in there),
                next_step="`freescale prepare INPUT OUT_DIR --schema FILE` keeps what a schema names",
            )
        # Asked for here, once: a loader process should not go through the data for them.
        known = self.statistics if any(each.scale == "standard" for each in self.schema) else {}
        unknown = [each.name for each in self.schema if each.scale == "standard" and each.name not in known]
        if unknown:
            raise DataError(
                f"the data set {self.source.name} does not know mean and deviation of a feature",
                got=", ".join(unknown),
                next_step="prepare it with a schema that names the feature",
            )

    @property
    def statistics(self) -> Statistics:
        """Of the source."""
        return self.source.statistics if isinstance(self.source, FeatureSource) else {}

    @property
    def of_items(self) -> tuple[Feature, ...]:
        """What is known of items besides their ids."""
        return tuple(each for each in self.schema if each.of == "item")

    def candidate_names(self) -> tuple[str, ...]:
        """What a candidate may be told of besides its item, as batches name it; outcomes are not among them."""
        return tuple(
            name
            for each in self.schema
            if each.name not in STRUCTURAL and not each.outcome and each.of == "event"
            for name in self._names(TARGET + each.name, each)
        )

    def of_next_events(self) -> frozenset[str]:
        """What batches hold of the events right behind theirs, by name; times are not among it."""
        return frozenset(
            (LABEL if each.outcome else TARGET) + name
            for each in self._of_events()
            for name in self._names(each.name, each)
        )

    def tokens(self, histories: Histories, index: IntArray) -> Arrays:
        """Features of the events at these places, and of the events right behind them.

        Args:
            histories: as the source has read them.
            index: places of the inputs; each is followed by its target in the same history.
        """
        users = self._raw_users(histories)
        owner = np.repeat(np.arange(len(histories.users)), histories.lengths)
        # Most events are both an input and a target: each is made once.
        used = np.zeros(int(histories.offsets[-1]), dtype=bool)
        used[index] = True
        used[index + 1] = True
        number = np.cumsum(used) - 1
        made = self._events(histories, np.flatnonzero(used), users, owner)
        here, following = number[index], number[index + 1]
        found: Arrays = {name: values[here] for name, values in made.items()}
        for each in self.schema:
            prefix = LABEL if each.outcome else TARGET
            for name in self._names(each.name, each):
                if name in made:
                    found[prefix + name] = made[name][following]
        return found

    def requests(
        self,
        histories: Histories,
        index: IntArray | None,
        candidates: IntArray,
        first: IntArray,
        *,
        together: bool,
    ) -> Arrays:
        """Features of the tokens of requests: events as they were, candidates without what is known only afterwards.

        Args:
            histories: as the source has read them.
            index: places of events and candidates; None: all that were read.
            candidates: which of those are candidates.
            first: of each of them the place of the first candidate of its request, whose values are the request's.
            together: candidates were shown together, so that each row says what was known of it. Else they are events
                that came one after the other, and at the time of the request only what the first one says was known.
        """
        wanted = self._of_events()
        members = {name for each in wanted for name in each.cross}
        names = {*members, *(each.name for each in wanted)}
        if any(self.schema[name].of == "item" for name in members):
            names.add("item")
        num = int(histories.offsets[-1]) if index is None else len(index)
        raw: Arrays = {}
        for name in names & set(histories.columns):
            column, feature = histories.columns[name], self.schema.features.get(name)
            if feature is not None and feature.of == "request":
                taken = _blanked(feature, np.zeros((num, *column.shape[1:]), column.dtype), None)
                taken[candidates] = column[first]
            else:
                taken = column.copy() if index is None else column[index]
                if feature is not None and feature.outcome:
                    taken = _blanked(feature, taken, candidates)
                elif feature is not None and name not in STRUCTURAL and not together:
                    taken[candidates] = column[first]
            raw[name] = taken
        raw |= self._beside(raw, members, self._raw_users(histories), lambda: _owners(histories, index))
        return self._made(wanted, raw)

    def events(self, histories: Histories) -> Arrays:
        """Features of all events, and nothing of what comes next: what a service knows."""
        owner = np.repeat(np.arange(len(histories.users)), histories.lengths)
        return self._events(histories, np.arange(len(owner)), self._raw_users(histories), owner)

    def samples(self, histories: Histories) -> Arrays:
        """Features of the users."""
        raw = self._raw_users(histories)
        wanted = [each for each in self.schema if each.of == "user"]
        return self._made(wanted, raw)

    def fronts(self, histories: Histories, index: IntArray) -> Arrays:
        """Crosses that stand in front of a request: those of its only candidate, which is at this place."""
        wanted = [each for each in self.schema if each.cross and each.of == "request"]
        if not wanted:
            return {}
        owner = np.repeat(np.arange(len(histories.users)), histories.lengths)
        return self._made(wanted, self._raw(wanted, histories, index, self._raw_users(histories), owner))

    def items(self, index: IntArray) -> Arrays:
        """Features of the items with these indices in the catalogue, and their ids, without any event."""
        return {
            "item": self.source.items.ids[index],
            **self._made(list(self.of_items), self._raw_items(index)),
        }

    def _of_events(self) -> list[Feature]:
        """All features of events that batches carry, crosses among them but for those in front."""
        owners = ("event", "request")
        return [
            each
            for each in self.schema
            if each.of in owners
            and each.name not in STRUCTURAL
            and each.place != "front"
            and each.name not in self.left_out
        ]

    def _events(self, histories: Histories, index: IntArray, users: Arrays, owner: IntArray) -> Arrays:
        """All features of the events at these places."""
        wanted = self._of_events()
        return self._made(wanted, self._raw(wanted, histories, index, users, owner))

    def _raw(
        self, wanted: list[Feature], histories: Histories, index: IntArray, users: Arrays, owner: IntArray
    ) -> Arrays:
        """What these features of the events at these places are made of."""
        members = {name for each in wanted for name in each.cross}
        names = {"item", *members, *(each.name for each in self.schema.columns())}
        raw: Arrays = {name: column[index] for name, column in histories.columns.items() if name in names}
        return raw | self._beside(raw, members, users, lambda: owner[index])

    def _beside(self, raw: Arrays, members: set[str], users: Arrays, owner: Callable[[], IntArray]) -> Arrays:
        """What members of crosses are beside columns of events: of their items, and of their users."""
        found: Arrays = {}
        if any(self.schema[name].of == "item" for name in members):
            numbers = item_numbers(self.source.items.ids, raw["item"].astype(np.int64, copy=False))
            found |= self._raw_items(numbers)
        of_users = [name for name in users if name in members]
        if of_users:
            whose = owner()
            found |= {name: users[name][whose] for name in of_users}
        return found

    def _raw_items(self, index: IntArray) -> Arrays:
        names = [each.name for each in self.schema.stored("item")]
        if not names or not isinstance(self.source, FeatureSource):
            return {}
        return self.source.item_features().take(index, names)

    def _raw_users(self, histories: Histories) -> Arrays:
        return {"user": histories.users, **histories.user_columns}

    def _made(self, wanted: list[Feature], raw: Arrays) -> Arrays:
        """These features from raw columns."""
        found: Arrays = {}
        for each in wanted:
            if each.cross:
                members = [self._id_of(member, raw) for member in self.schema.members(each)]
                found[each.name] = cross_ids(each.name, members)
            else:
                found |= self._of_column(each, raw[each.name])
        return found

    def _id_of(self, member: Feature, raw: Arrays) -> IntArray:
        column = raw[member.name]
        ids = buckets(column, member.edges) if member.edges else column
        return np.ascontiguousarray(ids, dtype=np.int64)

    def _of_column(self, feature: Feature, column: npt.NDArray[Any]) -> Arrays:
        name = feature.name
        if feature.edges:
            return {name: buckets(column, feature.edges)}
        if feature.kind not in ("number", "vector"):
            return {name: column}
        missing = np.isnan(column) if column.ndim == 1 else np.isnan(column[:, 0])
        scaled = self._scaled(feature, column)
        scaled[missing] = 0
        return {name: scaled, name + MISSING: missing}

    def _scaled(self, feature: Feature, column: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if feature.scale == "log":
            return (np.sign(column) * np.log1p(np.abs(column))).astype(np.float32)
        if feature.scale == "standard":
            known = self.statistics[feature.name]
            return ((column.astype(np.float64) - known["mean"]) / known["std"]).astype(np.float32)
        return column.astype(np.float32)

    def _names(self, name: str, feature: Feature) -> tuple[str, ...]:
        """What a batch holds of a feature."""
        flagged = feature.kind in ("number", "vector") and not feature.edges
        return (name, name + MISSING) if flagged else (name,)


def _blanked(feature: Feature, column: npt.NDArray[Any], where: IntArray | None) -> npt.NDArray[Any]:
    """A column with no value at some places, or anywhere, as what is missing is stored; may write over it."""
    blank: Any = 0 if feature.kind == "bits" else NONE if feature.kind in ("id", "ids") else np.nan
    if feature.kind in ("number", "vector") and not np.issubdtype(column.dtype, np.floating):
        column = column.astype(np.float32)
    column[slice(None) if where is None else where] = blank
    return column


def _owners(histories: Histories, index: IntArray | None) -> IntArray:
    """Whose history each of these places is in."""
    owner = np.repeat(np.arange(len(histories.users)), histories.lengths)
    return owner if index is None else owner[index]


def buckets(column: npt.NDArray[Any], edges: tuple[float, ...]) -> IntArray:
    """[n] the number of the bucket: how many edges are not above the value; NONE where there is no value."""
    # Edges in single precision, as the values are: 0.7 would else lie below the edge 0.7.
    found = np.searchsorted(np.asarray(edges, dtype=np.float32), column.astype(np.float32), side="right")
    return np.where(np.isnan(column), NONE, found).astype(np.int64)
