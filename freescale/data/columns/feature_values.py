"""Columns of features as checked values. Unlike users, items and times, a feature may be missing.

id       int64, NONE where there is none            number   float32, NaN where there is none
ids      lists of int64, empty where there is none  vector   [n, width] float32, NaN where there is none
bits     int64, bit n for the n-th name, else 0     time     int64 seconds, never missing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.arrow import NOTHING, is_text
from freescale.data.columns.ids import WORDS, IdKind, OtherIdsError, read_ids
from freescale.data.columns.lists import Lists
from freescale.data.columns.split_text import is_listed, rows_and_values
from freescale.data.columns.times import AUTO, TimeReader
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.schema.feature import Feature
from freescale.data.schema.vocabulary import MOST_VALUES, NONE
from freescale.data.source import IntArray

_CORRECT = "correct the input, or skip such lines (`--bad-lines skip`)"


class FeatureValues:
    """Reads the columns of some features of one input.

    Args:
        features: those that have a column in it.
        marks: what stands between the values of a list that is written as text.
        time_unit: of times that are plain numbers.
    """

    def __init__(
        self, features: Iterable[Feature] = (), *, marks: str = "|;,", time_unit: str = AUTO
    ) -> None:
        self.features = {feature.name: feature for feature in features}
        self.num_cut = dict.fromkeys(self.features, 0)
        self._marks = marks
        self._times = {
            name: TimeReader(time_unit) for name, each in self.features.items() if each.kind == "time"
        }
        readers: dict[str, Callable[[Feature, Any, IdKind], Events]] = {
            "id": self._id,
            "ids": self._ids,
            "number": self._number,
            "vector": self._vector,
            "bits": self._bits,
            "time": self._time,
        }
        self._readers = {name: readers[each.kind] for name, each in self.features.items()}

    def __contains__(self, role: object) -> bool:
        return role in self.features

    def read(self, role: str, column: Any, kind: IdKind) -> Events:
        """The values of a feature, and the words of its ids; a ValueError where one cannot be used.

        Raises:
            OtherIdsError: its ids are of another kind.
        """
        column = _known_type(column)
        reader, feature = self._readers[role], self.features[role]
        if not is_text(column.type) or feature.kind in ("number", "time"):
            return reader(feature, column, kind)
        # The same words come again and again: a cell that occurs twice is taken apart once.
        encoded = column.dictionary_encode(null_encoding="encode")
        if 2 * len(encoded.dictionary) > len(column):
            return reader(feature, column, kind)
        index = encoded.indices.to_numpy(zero_copy_only=False)
        try:
            found = reader(feature, encoded.dictionary, kind)
        except OtherIdsError as other:
            raise OtherIdsError(other.kind, other.value, int(np.argmax(index == other.index))) from None
        return {**found, role: found[role][index]}

    def saw(self, events: Events) -> None:
        """Cut the longest lists of events that were kept, and count them."""
        for name, feature in self.features.items():
            if feature.kind != "ids":
                continue
            num_cut = int((events[name].lengths > _most(feature)).sum())
            if num_cut:
                self.num_cut[name] += num_cut
                events[name] = events[name].cut(_most(feature))

    def allowed(self, role: str) -> str:
        """What a value must be, for messages."""
        feature = self.features[role]
        if feature.values:
            return f"one of {', '.join(feature.values[:20])}" + (", ..." if len(feature.values) > 20 else "")
        if feature.map == "direct" and feature.rows is not None and feature.kind in ("id", "ids"):
            return f"0 to {feature.rows - 1}: with map: direct every id has its own row, and rows is {feature.rows}"
        return {
            "id": "a whole number of 64 bits, or text; or nothing",
            "ids": f"ids, with one of {' '.join(self._marks)} between them; or nothing",
            "number": "a finite number, or nothing",
            "vector": f"{feature.width} finite numbers, or nothing",
            "bits": f"some of {', '.join(feature.names)}, or their bits as a number; or nothing",
            "time": self._times[role].allowed if role in self._times else "",
        }[feature.kind]

    def remedy(self, role: str) -> str:
        """What helps against a value that is none."""
        return _CORRECT

    def describe(self) -> list[str]:
        """What was taken from which column, a line a feature."""
        said = []
        for name, feature in self.features.items():
            cut = self.num_cut[name]
            note = f"; {cut:,} longer lists cut at {_most(feature)}, see width" if cut else ""
            said.append(f"{name}: {feature.input_name} ({feature.of}, {feature.kind}{note})")
        return said

    def _id(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        if is_listed(column.type):
            raise ValueError("a list is no single id")
        there = np.flatnonzero(_is_there(column, feature.values))
        present = column if len(there) == len(column) else column.take(pa.array(there))
        try:
            read = self._read_ids(feature, present, kind)
        except OtherIdsError as found:
            raise OtherIdsError(found.kind, found.value, int(there[found.index])) from None
        hashes = read[feature.name]
        ids = hashes
        if len(there) < len(column):
            ids = np.full(len(column), NONE, dtype=np.int64)
            ids[there] = hashes
        return _with_words(feature.name, ids, hashes, read)

    def _ids(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        rows, values = rows_and_values(column, self._marks)
        there = np.flatnonzero(_is_there(values, feature.values))
        rows, values = rows[there], values.take(pa.array(there))
        try:
            read = self._read_ids(feature, values, kind)
        except OtherIdsError as found:
            raise OtherIdsError(found.kind, found.value, int(rows[found.index])) from None
        lists = Lists.of(read[feature.name], np.bincount(rows, minlength=len(column)).astype(np.int64))
        return _with_words(feature.name, lists, read[feature.name], read)

    def _read_ids(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        if feature.values:
            return {feature.name: _numbered(column, feature.values)}
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        read = read_ids(feature.name, column, kind)
        ids = read[feature.name]
        if len(ids) and int(ids.min()) == NONE:
            raise ValueError("this number stands for nothing")
        bounded = feature.map == "direct" and feature.rows is not None and kind == "int64" and len(ids)
        if bounded and not (int(ids.min()) >= 0 and int(ids.max()) < (feature.rows or 0)):
            raise ValueError("no row for it")
        return read

    def _number(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        there = _is_there(column, ())
        with np.errstate(over="ignore"):
            numbers = _floats(column.filter(pa.array(there))).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ValueError("not finite")
        out = np.full(len(column), np.nan, dtype=np.float32)
        out[there] = numbers
        return {feature.name: out}

    def _vector(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        width = feature.width or 1
        rows, values = rows_and_values(column, self._marks + " ")
        counts = np.bincount(rows, minlength=len(column))
        if not np.isin(counts, (0, width)).all():
            raise ValueError("another width")
        with np.errstate(over="ignore"):
            numbers = _floats(values).astype(np.float32)
        if values.null_count or not np.isfinite(numbers).all():
            raise ValueError("not finite")
        out = np.full((len(column), width), np.nan, dtype=np.float32)
        out[counts == width] = numbers.reshape(-1, width)
        return {feature.name: out}

    def _bits(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        if is_text(column.type):
            number = pc.match_substring_regex(column, r"^\d+(\.0+)?$")
            known = pc.is_in(column, pa.array(feature.names, type=column.type))
            if pc.all(pc.or_(number, pc.is_in(column, pa.array(NOTHING, type=column.type)))).as_py() and not (
                pc.any(known).as_py()
            ):
                column = pc.if_else(number, column, None).cast(pa.float64())
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int64())
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64())
        if pa.types.is_integer(column.type):
            bits = column.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=False)
            if len(bits) and (int(bits.min()) < 0 or int(bits.max()) >= 2 ** len(feature.names)):
                raise ValueError("a bit without a name")
            return {feature.name: bits}
        rows, values = rows_and_values(column, self._marks)
        there = np.flatnonzero(_is_there(values, feature.names))
        which = _numbered(values.take(pa.array(there)), feature.names)
        bits = np.zeros(len(column), dtype=np.int64)
        np.bitwise_or.at(bits, rows[there], np.left_shift(np.int64(1), which))
        return {feature.name: bits}

    def _time(self, feature: Feature, column: Any, kind: IdKind) -> Events:
        if not _is_there(column, ()).all():
            raise ValueError("missing value")
        reader = self._times[feature.name]
        reader.learn(column)
        return {feature.name: reader.read(column)["time"]}


def _most(feature: Feature) -> int:
    """Values of one list that are kept."""
    return feature.width or MOST_VALUES


def _with_words(name: str, ids: Any, hashes: IntArray, read: Events) -> Events:
    """The column, and where its ids are words those words with their hashes."""
    words = read.get(name + WORDS)
    return {name: ids} if words is None else {name: ids, name + WORDS: (hashes, words)}


def _known_type(column: Any) -> Any:
    """The same with texts as text; a ValueError for bytes that are none."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string_view(kind):
        return pc.utf8_trim_whitespace(column.cast(pa.string()))
    return column


def _is_there(column: Any, named: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which values are there; words for nothing are none, unless the schema names them ("NA" is a country)."""
    there = column.is_valid()
    if is_text(column.type):
        nothing = pa.array([word for word in NOTHING if word not in named], type=column.type)
        there = pc.and_(there, pc.invert(pc.is_in(column, nothing)))
    elif pa.types.is_floating(column.type):
        there = pc.and_(there, pc.invert(pc.is_nan(column)).fill_null(False))
    return there.to_numpy(zero_copy_only=False)


def _floats(column: Any) -> npt.NDArray[np.float64]:
    """Numbers, or texts of numbers; a ValueError or an Arrow error else."""
    if is_listed(column.type):
        raise ValueError("a list is no number")
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _numbered(column: Any, values: tuple[str, ...]) -> IntArray:
    """The place of each value in a list of all there can be; a ValueError where one is not in it."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
    elif pa.types.is_floating(column.type):
        column = column.cast(pa.int64())
    encoded = column.cast(pa.string()).dictionary_encode()
    places = {value: place for place, value in enumerate(values)}
    found = [places.get(str(word)) for word in encoded.dictionary.to_pylist()]
    if None in found:
        raise ValueError("none of the values")
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    return np.array(found, dtype=np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
