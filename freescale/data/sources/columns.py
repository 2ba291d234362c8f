"""A prepared data set as flat columns in memory maps: any event is a few bytes at a known place.

    data.source=columns data.path=FOLDER          FOLDER as `freescale prepare` has written it

Row groups of Parquet are read whole, which is right where whole histories are wanted. A request of MLPerf's DLRMv4
wants 2,663 of 20,000 events, of another user each time. So beside the data set, in FOLDER/columns, there is a file for
each column, all users one after the other, and for each kind of event a file of the places where it stands. They are
made once, some users at a time; all processes of a machine share the pages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.data.pools import PoolIndex, PoolRule
from freescale.data.scan import row_blocks
from freescale.data.source import Histories, IntArray, SequenceSource
from freescale.data.sources.parquet import ParquetOptions, make_parquet
from freescale.data.stored.digest import DigestedSource
from freescale.errors import DataError
from freescale.jagged import offsets_of, spans
from freescale.registry import register

FOLDER, FACTS = "columns", "facts.json"
_BLOCK = 1 << 24
Column = npt.NDArray[np.generic]


class ColumnSource:
    """The data set of another source, its events in memory maps.

    Args:
        inner: where all else comes from.
        folder: where the columns are; they are made if they are not there.
    """

    def __init__(self, inner: SequenceSource, folder: str | Path) -> None:
        self._inner, self.folder = inner, Path(folder)
        facts = self.folder / FACTS
        if not facts.exists():
            write_columns(inner, self.folder)
        self._facts: dict[str, Any] = json.loads(facts.read_text())
        self.offsets: IntArray = offsets_of(inner.lengths)
        if self._facts["events"] != int(self.offsets[-1]):
            raise self._of_others(f"{self._facts['events']:,} events there, {int(self.offsets[-1]):,}")
        if self._facts.get("digest", digest := _digest(inner)) != digest:
            raise self._of_others("other histories there than")
        self._maps: dict[str, Column] = {}

    def _of_others(self, differs: str) -> DataError:
        return DataError(
            f"{self.folder} belongs to another data set",
            got=f"{differs} in {self._inner.name}",
            next_step=f"remove {self.folder}: it is made again",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_inner", "_maps"):  # while it is unpickled there is nothing yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def read(self, rows: Sequence[int] | IntArray) -> Histories:
        """The histories of these rows, in the order asked for."""
        rows = np.asarray(rows, np.int64)
        places, offsets = spans(self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows])
        return self.events(rows, places, offsets)

    def events(self, rows: IntArray, places: IntArray, offsets: IntArray) -> Histories:
        """Some events of these rows.

        Args:
            rows: whose; any may come several times.
            places: of the events among all of the data set, row after row.
            offsets: [rows + 1] where those of each row begin.
        """
        kinds: Mapping[str, str] = self._facts["columns"]
        columns = {name: self.column(name)[places].astype(kind, copy=False) for name, kind in kinds.items()}
        of_users = {name: self.column(f"user.{name}")[rows] for name in self._facts["user_columns"]}
        return Histories(self.column("users")[rows].astype(np.int64), offsets, columns, of_users)

    def pools(self, rule: PoolRule) -> PoolIndex:
        """Where the events of each kind stand among all events."""
        names = [f"{rule.column}={kind}" for kind in rule.kinds]
        for name, kind in zip(names, rule.kinds):
            if name not in self._maps and not (self.folder / f"{name}.npy").exists():
                self._write_places(name, rule.column, kind)
        return PoolIndex.of_places([self.column(name) for name in names], self.offsets, rule)

    def _write_places(self, name: str, column: str, kind: int) -> None:
        values = self.column(column)
        blocks = range(0, len(values), _BLOCK)
        count = sum(int(np.count_nonzero(values[at : at + _BLOCK] == kind)) for at in blocks)
        with _Written(self.folder / f"{name}.npy", np.dtype(np.int64), count) as out:
            end = 0
            for at in blocks:
                found = np.flatnonzero(values[at : at + _BLOCK] == kind) + at
                out[end : end + len(found)] = found
                end += len(found)

    def column(self, name: str) -> Column:
        """A column of all events, row after row, or one of the users."""
        if name not in self._maps:
            self._maps[name] = np.asarray(np.load(self.folder / f"{name}.npy", mmap_mode="r"))
        return self._maps[name]


class _Written:
    """A file of numbers that is there only when it is whole.

    Args:
        path: of the file.
        dtype: of its numbers.
        shape: how many.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: int | tuple[int, ...]) -> None:
        self._path, self._aside = path, path.with_name(f"{path.name}.{os.getpid()}")
        self._shape, self._dtype = (shape,) if isinstance(shape, int) else shape, dtype

    def __enter__(self) -> Column:
        if not self._shape[0]:
            np.save(self._aside.open("wb"), np.zeros(self._shape, self._dtype))
            return np.zeros(self._shape, self._dtype)
        self._map = np.lib.format.open_memmap(self._aside, mode="w+", dtype=self._dtype, shape=self._shape)
        return self._map

    def __exit__(self, kind: object, *_: object) -> None:
        self.__dict__.pop("_map", None)
        if kind is None:
            os.replace(self._aside, self._path)
        else:
            self._aside.unlink(missing_ok=True)


def write_columns(source: SequenceSource, folder: str | Path) -> None:
    """All columns of a data set as files, as narrow as their numbers allow; goes through it twice, in blocks."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kinds, narrow, of_users = _look(source)
    events, rows = int(np.sum(source.lengths)), len(source.lengths)
    files = {name: _Written(folder / f"{name}.npy", narrow[name], events) for name in kinds}
    files["users"] = _Written(folder / "users.npy", np.dtype(np.int64), rows)
    for name, like in of_users.items():
        files[f"user.{name}"] = _Written(folder / f"user.{name}.npy", like.dtype, (rows, *like.shape[1:]))
    opened = {name: file.__enter__() for name, file in files.items()}
    begin = 0
    for block in row_blocks(source):
        part = source.read(block)
        end = begin + int(part.offsets[-1])
        for name in kinds:
            opened[name][begin:end] = part.columns[name]
        opened["users"][block] = part.users
        for name in of_users:
            opened[f"user.{name}"][block] = part.user_columns[name]
        begin = end
    opened.clear()
    for file in files.values():
        file.__exit__(None)
    facts = {
        "events": events,
        "columns": kinds,
        "user_columns": list(of_users),
        "digest": _digest(source),
    }
    (folder / FACTS).write_text(json.dumps(facts))


def _digest(source: SequenceSource) -> str:
    """Of the histories, as far as a source says what it holds without reading them; "" elsewhere."""
    if not isinstance(source, DigestedSource):
        return ""
    return hashlib.blake2b(json.dumps(dict(source.digests())).encode(), digest_size=8).hexdigest()


def _look(source: SequenceSource) -> tuple[dict[str, str], dict[str, np.dtype[Any]], dict[str, Column]]:
    """Types of columns, the narrowest that hold their numbers, and columns of users."""
    ends: dict[str, tuple[int, int]] = {}
    kinds: dict[str, np.dtype[Any]] = {}
    of_users: dict[str, Column] = {}
    for block in row_blocks(source):
        part = source.read(block)
        of_users = dict(part.user_columns)
        for name, column in part.columns.items():
            if column.ndim > 1:
                raise DataError(
                    "data.source=columns holds one number an event",
                    got=f"{name}, which has {column.shape[1]}",
                    next_step="leave data.source out, or prepare the data without it",
                )
            kinds[name] = column.dtype
            if np.issubdtype(column.dtype, np.integer) and len(column):
                low, high = ends.get(name, (0, 0))
                ends[name] = min(low, int(column.min())), max(high, int(column.max()))
    narrow = {
        name: np.result_type(*map(np.min_scalar_type, ends[name])) if name in ends else kind
        for name, kind in kinds.items()
    }
    return {name: str(kind) for name, kind in kinds.items()}, narrow, of_users


@register("source", "columns", options=ParquetOptions)
def make_columns(path: str, options: ParquetOptions, *, seed: int) -> ColumnSource:
    """The columns of a prepared data set, made beside it where they are not there."""
    inner = make_parquet(path, options, seed=seed)
    return ColumnSource(inner, inner.path / FOLDER)
