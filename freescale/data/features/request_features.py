"""What a request says of its events and its user: features by name, in the user's own words, read as `prepare` does.

    {"country": "de", "watched": [12, None]} ──columns/feature_values──> raw columns ──feature_batch──> as in batches

So a value means in a service what it meant in training: the same code reads words, makes buckets, scales and crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import is_text
from freescale.data.columns.feature_values import FeatureValues
from freescale.data.columns.ids import IdKind, IdKinds, OtherIdsError
from freescale.data.columns.split_text import is_listed
from freescale.data.excerpt import excerpt
from freescale.data.features.feature_batch import Arrays, BatchFeatures
from freescale.data.features.feature_source import padded_column
from freescale.data.features.served_items import ServedItems
from freescale.data.schema.feature import Feature, Schema
from freescale.data.schema.vocabulary import NONE
from freescale.data.source import Histories, IntArray
from freescale.errors import DataError, nearest
from freescale.jagged import offsets_of

_BAD = (ValueError, TypeError, OverflowError, pa.ArrowException, OtherIdsError)
_LISTS = ("ids", "bits", "vector")
_MEANS = {"id": "an id", "ids": "ids", "number": "a number", "vector": "a vector", "time": "a time"}


@dataclass(frozen=True)
class FeatureRequest:
    """One user of a batch.

    Args:
        given: features by name.
        num_events: of the history as the request has it.
        kept: [n] numbers of the events that are looked at.
        who: what messages begin with.
    """

    given: Mapping[str, Any]
    num_events: int
    kept: IntArray
    who: str = ""


def asked_features(schema: Schema, tokens: Iterable[str]) -> tuple[Feature, ...]:
    """What a request must say, in the order of the schema.

    Args:
        schema: of a run.
        tokens: features of events and users that its model looks at; a cross asks for its members.
    """
    wanted = [schema[name] for name in tokens]
    names = {name for each in wanted for name in (each.cross or (each.name,))}
    return tuple(each for each in schema if each.name in names and each.of != "item" and each.name != "item")


def of_candidates_alone(schema: Schema, tokens: Iterable[str]) -> frozenset[str]:
    """Features of events that only crosses in front are made of: asked of candidates, and of no event."""
    wanted = [schema[name] for name in tokens]
    front = {name for each in wanted if each.place == "front" for name in each.cross}
    events = {name for each in wanted if each.place != "front" for name in (each.cross or (each.name,))}
    return frozenset(name for name in front - events if schema[name].of == "event" and name != "item")


def has_fronts(schema: Schema, tokens: Iterable[str]) -> bool:
    """Whether crosses of a candidate stand in front of its history: each candidate has a sequence of its own then."""
    return any(schema[name].cross and schema[name].of == "request" for name in tokens)


class RequestArrays(NamedTuple):
    """Features of requests as batches have them: of events and candidates, of users, and crosses in front.

    `fronts` has one value a candidate.
    """

    tokens: Arrays
    samples: Arrays
    fronts: Arrays


def served_schema(schema: Schema, tokens: Iterable[str]) -> Schema:
    """The part of a schema that a service needs: the features of its model, and what crosses are made of."""
    names = {"item", *tokens}
    names |= {member for name in names for member in schema[name].cross}
    return Schema({each.name: each for each in schema if each.name in names})


class RequestFeatures:
    """Reads the features of requests.

    Args:
        items: the catalogue, and what the training part says of numbers.
        tokens: names of the features of events and users that the model looks at.
        kinds: of the ids of every table; whole numbers where it is not named.
    """

    def __init__(self, items: ServedItems, tokens: Sequence[str], kinds: IdKinds) -> None:
        self.needed = {each.name: each for each in asked_features(items.schema, tokens)}
        self.of_candidates = of_candidates_alone(items.schema, tokens)
        self._batches = BatchFeatures(items, items.schema, left_out=self.of_candidates)
        self._kinds = kinds
        # Whether an id has a row is the map's business: one that has none is unknown, not wrong.
        self._values = FeatureValues(replace(each, map=None, rows=None) for each in self.needed.values())

    def check(self, request: FeatureRequest) -> None:
        """Refuse a request that lacks a feature, has one too many, or has another number of values than events."""
        strange = [name for name in request.given if name not in self.needed]
        if strange:
            raise self._strange(strange[0], request)
        missing = [name for name in self.needed if name not in request.given]
        if missing:
            raise DataError(
                f"{request.who}the model needs {'a feature' if len(missing) == 1 else 'features'} "
                f"that the request lacks: {', '.join(missing)}",
                got=", ".join(request.given) or "no features",
                next_step=f"features={{{missing[0]!r}: ...}}; None says that there is no value. "
                + "; ".join(describe(self.needed[name]) for name in missing),
            )
        for name, feature in self.needed.items():
            value = request.given[name]
            if feature.of != "user" and value is not None and _num_values(value) != request.num_events:
                raise DataError(
                    f"{request.who}{name} needs one value for every event of the history",
                    got=f"{request.num_events} events, {_num_values(value)} values",
                    next_step="None stands for a value that is missing",
                )

    def read(
        self, requests: Sequence[FeatureRequest], items: IntArray, candidates: IntArray | None = None
    ) -> RequestArrays:
        """Features of all events kept, and of all users, as batches have them.

        Args:
            requests: checked before.
            items: ids of the items of the events kept, one request behind the other.
            candidates: which of these are candidates; none unless given.
        """
        columns = {feature.name: self._column(feature, requests) for feature in self.needed.values()}
        self._values.saw(columns)
        arrays = {name: padded_column(column, _longest(column)) for name, column in columns.items()}
        users = arrays.pop("user", np.full(len(requests), NONE, dtype=np.int64))
        sizes = [len(request.kept) for request in requests]
        histories = Histories(
            users=users,
            offsets=offsets_of(sizes),
            columns={"item": items, **self._of("event", arrays), **self._of("request", arrays)},
            user_columns=self._of("user", arrays),
        )
        fronts = {} if candidates is None else self._batches.fronts(histories, candidates)
        return RequestArrays(self._batches.events(histories), self._batches.samples(histories), fronts)

    def raw(self, name: str, values: Sequence[Any] | None, count: int) -> npt.NDArray[Any]:
        """[count] a feature of so many events as the data set has it; None: nobody says it of any."""
        alone = FeatureRequest({name: values}, count, np.arange(count))
        found: npt.NDArray[Any] = self._column(self.needed[name], [alone])
        return found

    def _of(self, owner: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values for name, values in arrays.items() if self.needed[name].of == owner}

    def _column(self, feature: Feature, requests: Sequence[FeatureRequest]) -> Any:
        """The raw column of a feature over all requests."""
        values: list[Any] = []
        for request in requests:
            given = request.given[feature.name]
            if feature.of == "user":
                values.append(given)
            else:
                values += [None] * len(request.kept) if given is None else [given[n] for n in request.kept]
        try:
            return self._read(feature, values)
        except _BAD:
            pass
        if feature.values:
            values = self._without_unknown(feature, values)
        bad = next((n for n, value in enumerate(values) if not self._reads(feature, value)), None)
        if bad is None and not feature.values:
            raise self._bad(feature, values[:3], "")
        if bad is not None:
            raise self._bad(feature, values[bad], _owner(feature, requests, bad).who)
        return self._read(feature, values)

    def _read(self, feature: Feature, values: Sequence[Any]) -> Any:
        kind = self._kind(feature)
        return self._values.read(feature.name, _arrow(feature, values, kind), kind)[feature.name]

    def _reads(self, feature: Feature, value: Any) -> bool:
        try:
            self._read(feature, [value])
        except _BAD:
            return False
        return True

    def _without_unknown(self, feature: Feature, values: Sequence[Any]) -> list[Any]:
        """The same without values that a closed list does not have: a service is told of new ones first."""
        known: dict[Any, bool] = {}

        def kept(value: Any) -> Any:
            if _listed(value):
                return [one for one in value if kept(one) is not None]
            if value not in known:
                known[value] = self._reads(feature, value)
            return value if known[value] else None

        return [kept(value) for value in values]

    def _kind(self, feature: Feature) -> IdKind:
        return self._kinds.get(feature.table_name or feature.name, "int64")

    def _bad(self, feature: Feature, value: Any, who: str) -> DataError:
        kind = self._kind(feature)
        allowed = self._values.allowed(feature.name)
        if feature.raw_ids and kind != "text":
            allowed = "a whole number, as in the training data; or None"
        return DataError(
            f"{who}the {feature.name} cannot be used",
            got=f"{excerpt(repr(value))} ({type(value).__name__})",
            allowed=allowed,
        )

    def _strange(self, name: str, request: FeatureRequest) -> DataError:
        close = nearest(name, [each for each in self.needed if each not in request.given])
        needed = ", ".join(self.needed) or "none"
        return DataError(
            f"{request.who}the model asks for no feature {name!r}",
            got=f"{name!r}; features of items are in their vectors already",
            allowed=needed,
            next_step=f"did you mean {close}?" if close else "leave it out",
        )


def describe(feature: Feature, *, of_candidates: bool = False) -> str:
    """What a request must say of a feature, in one line; perhaps of candidates alone."""
    if feature.values:
        some = ", ".join(feature.values[:6]) + (", ..." if len(feature.values) > 6 else "")
        means = f"{'some' if feature.kind == 'ids' else 'one'} of {some}"
    elif feature.kind == "bits":
        means = f"some of {', '.join(feature.names)}"
    elif feature.kind == "vector":
        means = f"{feature.width} numbers"
    else:
        means = _MEANS[feature.kind]
    every = "of every candidate" if of_candidates else "of every event"
    owner = {"user": "of the user", "request": "of the request"}.get(feature.of, every)
    return f"{feature.name}: {owner}, {means}" + (", known after it" if feature.outcome else "")


def _owner(feature: Feature, requests: Sequence[FeatureRequest], number: int) -> FeatureRequest:
    """The request that the value with this number comes from."""
    if feature.of == "user":
        return requests[number]
    ends = np.cumsum([len(request.kept) for request in requests])
    return requests[int(np.searchsorted(ends, number, side="right"))]


def _num_values(value: Any) -> int | str:
    return len(value) if _listed(value) else f"not a list but {excerpt(repr(value))}: no"


def _listed(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _longest(column: Any) -> int:
    """Values of the longest list."""
    lengths = getattr(column, "lengths", None)
    return 1 if lengths is None or not len(lengths) else max(1, int(lengths.max()))


def _arrow(feature: Feature, values: Sequence[Any], kind: IdKind) -> Any:
    """Values as a column of a file has them."""
    try:
        column = pa.array(values, from_pandas=True)
    except _BAD:
        # Numbers beside words, one beside lists, sets: made alike first, which takes a while.
        listed = any(map(_listed, values))
        text = bool(feature.values) or (feature.raw_ids and kind != "int64")
        column = pa.array([_plain(value, listed=listed, as_text=text) for value in values])
    if is_listed(column.type) and feature.kind not in _LISTS:
        raise ValueError("a list is no single value")
    return pc.utf8_trim_whitespace(column) if is_text(column.type) else column


def _plain(value: Any, *, listed: bool, as_text: bool) -> Any:
    """A value as Arrow reads it; where others are lists, one alone is a list of one."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if listed:
        ones = list(value) if _listed(value) else [value]
        return [_plain(one, listed=False, as_text=as_text) for one in ones]
    if isinstance(value, np.generic):
        value = value.item()
    return _word(value) if as_text and isinstance(value, int | float) else value


def _word(number: float) -> str:
    """A number where ids are words, as `prepare` writes it."""
    if isinstance(number, bool):
        return str(number).lower()
    return str(int(number)) if number == int(number) else str(number)
