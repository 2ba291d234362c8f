"""Values of raw columns as checked numbers, and what happens to those that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from freescale.data.columns.actions import ActionReader
from freescale.data.columns.arrow import NOT_UTF8, NOTHING, is_text
from freescale.data.columns.bad_lines import STOP, BadLines
from freescale.data.columns.feature_values import FeatureValues
from freescale.data.columns.ids import IdKinds, OtherIdsError, read_ids
from freescale.data.columns.roles import IGNORED, ROLES
from freescale.data.columns.times import AUTO, TimeReader
from freescale.data.excerpt import excerpt
from freescale.data.preparing.reading.event_columns import Events
from freescale.data.schema.feature import Feature
from freescale.data.source import IntArray
from freescale.errors import DataError

# From the number of a value to its place in the input and the text around it.
Locate = Callable[[int], tuple[str, str]]

_BAD_VALUE = (ValueError, pa.ArrowException)
_NO_KINDS: IdKinds = MappingProxyType({})


class ValueReader:
    """Turns raw columns of one input into events, and remembers what it took them for.

    Args:
        time_unit: of times that are plain numbers: "auto", "s", "ms", "us" or "ns".
        actions: word -> number, where the user gives them.
        bad_lines: "stop" or "skip".
        id_kinds: of users and items; see `columns/ids.py`.
        asked: those of them that the user has named: an id of another kind is a bad one.
        features: of a schema, that have a column in this input.
        marks: what stands between several values in one text.
    """

    def __init__(
        self,
        *,
        time_unit: str = AUTO,
        actions: Mapping[str, float] | None = None,
        bad_lines: str = STOP,
        id_kinds: IdKinds = _NO_KINDS,
        asked: IdKinds = _NO_KINDS,
        features: Sequence[Feature] = (),
        marks: str = "|;,",
    ) -> None:
        self._options: dict[str, Any] = {
            "time_unit": time_unit,
            "actions": actions,
            "bad_lines": bad_lines,
            "features": features,
            "marks": marks,
        }
        self.features = FeatureValues(features, marks=marks, time_unit=time_unit)
        self.id_kinds = id_kinds
        self._asked = asked
        self.times = TimeReader(time_unit)
        self.actions = ActionReader(actions)
        self.bad_lines = BadLines(bad_lines)
        self.num_events = 0
        self._taken: dict[str, str] | None = None
        self._ignored: list[str] = []

    def again(
        self, *, id_kinds: IdKinds = _NO_KINDS, asked: IdKinds = _NO_KINDS, marks: str | None = None
    ) -> ValueReader:
        """A new one with the same options, to read the input from its beginning."""
        options = self._options if marks is None else {**self._options, "marks": marks}
        return ValueReader(**options, id_kinds=id_kinds, asked=asked)

    def take(self, chosen: Mapping[str, str], names: Sequence[str]) -> None:
        """Remember which column plays which part, of the first file, and which of the names play none."""
        if self._taken is None:
            self._taken = dict(chosen)
            used = set(chosen.values())
            self._ignored = [name for name in names if name not in used and name != IGNORED]

    def events(self, raw: Mapping[str, Any], locate: Locate | None) -> Events:
        """Checked numbers of an Arrow array a role; without `locate` a bad value is a plain ValueError.

        Bad values are told with their place; the lines they stand in are left out where such lines are skipped.

        Raises:
            OtherIdsError: ids are of another kind than `id_kinds` says.
        """
        columns = {role: _plain(column) for role, column in raw.items()}
        self._learn(columns)
        try:
            events = self._numbers(columns, locate)
        except _BAD_VALUE:
            if locate is None:
                raise
            good = self._good_rows(columns, locate)
            self.bad_lines.check_few(self.num_events + len(good))
            kept = {role: column.take(pa.array(good)) for role, column in columns.items()}
            events = self._numbers(kept, _among(good, locate))
        self._saw(events)
        return events

    def describe(self) -> list[str]:
        """What was taken for user, item, time and action, what was ignored and skipped: a line each."""
        said = []
        for role in ROLES:
            if self._taken is None or role not in self._taken or role in self.features:
                continue
            how = {"time": self.times.describe, "action": self.actions.describe}.get(role)
            said.append(f"{role}: {self._taken[role]}" + (f" ({how()})" if how else ""))
        if self._taken is not None and {"user", "item"} <= set(self._taken) and "time" not in self._taken:
            said.append("time: none, events keep the order of the input")
        if self._ignored:
            said.append("ignored: " + ", ".join(self._ignored))
        return said + self.features.describe() + self.bad_lines.describe()

    def _learn(self, columns: Mapping[str, Any]) -> None:
        if "time" in columns:
            self.times.learn(columns["time"])
        if "action" in columns and "action" not in self.features:
            self.actions.learn(columns["action"])

    def _numbers(self, columns: Mapping[str, Any], locate: Locate | None) -> Events:
        events: Events = {}
        others: list[OtherIdsError] = []
        for role, column in columns.items():
            try:
                events.update(self._read(role, column))
            except OtherIdsError as found:
                others.append(found.at(role, locate(found.index)[0] if locate else "the input"))
            except _BAD_VALUE:
                if not others:
                    raise
        if others:
            # All at once: for each of them alone the input would be read once more.
            others[0].others = others[1:]
            raise others[0]
        return events

    def _saw(self, events: Events) -> None:
        self.num_events += len(next(iter(events.values())))
        self.features.saw(events)
        if "time" in events:
            self.times.saw(events["time"])
        if "action" in events and "action" not in self.features:
            self.actions.saw(events["action"])

    def _read(self, role: str, column: Any) -> Events:
        """The column as numbers of its role, or a ValueError."""
        if role in self.features:
            return self.features.read(role, column, self.id_kinds.get(role, "int64"))
        if column.null_count:
            raise ValueError("missing value")
        if role == "time":
            return self.times.read(column)
        if role == "action":
            return {role: self.actions.read(column)}
        try:
            return read_ids(role, column, self.id_kinds.get(role, "int64"))
        except OtherIdsError:
            if role in self._asked and self.bad_lines.skips:
                raise ValueError("not the kind that was asked for") from None
            raise

    def _good_rows(self, columns: Mapping[str, Any], locate: Locate) -> IntArray:
        """The numbers of lines without a bad value; the others are told."""
        good = np.ones(len(next(iter(columns.values()))), dtype=bool)
        for role, column in columns.items():
            there = np.flatnonzero(good)
            # Bad in an earlier column: told once.
            for number in there[self._bad_values(role, column.take(pa.array(there)))].tolist():
                good[number] = False
                self.bad_lines.take(partial(self._bad_value, role, column, number, locate))
        return np.flatnonzero(good)

    def _bad_values(self, role: str, column: Any) -> IntArray:
        """The numbers of bad values, found by halving; only the first where that one stops everything."""
        maybe = self._may_be(role, column)
        bad = np.flatnonzero(~maybe).tolist()
        there = np.flatnonzero(maybe)
        column = column.take(pa.array(there))
        spans = [(0, len(column))] if len(column) else []
        while spans:
            low, high = spans.pop()
            try:
                self._read(role, column.slice(low, high - low))
            except OtherIdsError:
                continue  # Not bad: all of the column is read again as another kind.
            except _BAD_VALUE:
                if high - low == 1:
                    bad.append(int(there[low]))
                    if not self.bad_lines.skips:
                        break
                else:
                    middle = (low + high) // 2
                    spans += [(middle, high), (low, middle)]
        bad.sort()
        return np.array(bad if self.bad_lines.skips else bad[:1], dtype=np.int64)

    def _may_be(self, role: str, column: Any) -> npt.NDArray[np.bool_]:
        """Which values are there and could be of this role; a feature need not be there."""
        if role in self.features:
            return np.ones(len(column), dtype=bool)
        maybe = column.is_valid()
        if is_text(column.type):
            maybe = pc.and_(maybe, pc.invert(pc.is_in(column, pa.array(NOTHING, type=column.type))))
            if role in ("time", "action"):
                reader = self.times if role == "time" else self.actions
                maybe = pc.and_(maybe, reader.may_be(column).fill_null(False))
        return maybe.to_numpy(zero_copy_only=False)

    def _bad_value(self, role: str, column: Any, number: int, locate: Locate) -> DataError:
        value, (where, text) = column[number], locate(number)
        nothing = not value.is_valid or str(value) in NOTHING
        got = repr(excerpt(str(value))) if value.is_valid else "nothing"
        what = "is missing" if nothing else "cannot be used"
        if role in self.features:
            allowed, next_step = self.features.allowed(role), self.features.remedy(role)
        else:
            allowed, next_step = ROLES[role].allowed, ROLES[role].remedy
        if role in ("time", "action") and role not in self.features:
            reader = self.times if role == "time" else self.actions
            allowed, next_step = reader.allowed, reader.remedy
        if value.is_valid and NOT_UTF8 in str(value):
            what, next_step = "is not UTF-8", "convert the file first, such as `iconv -f LATIN1 -t UTF-8`"
        return DataError(
            f"{where}: the {role} {what}", got=f"{got} in {text}", allowed=allowed, next_step=next_step
        )


def _among(rows: IntArray, locate: Locate) -> Locate:
    return lambda number: locate(int(rows[number]))


def _plain(column: Any) -> Any:
    """The column decoded, its texts without blanks around them."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return pc.utf8_trim_whitespace(column) if is_text(column.type) else column
