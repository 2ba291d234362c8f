"""Every word of a column of ids once, by its hash, in bounded memory: sorted runs on disk, merged range by range."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from freescale.data.excerpt import excerpt
from freescale.data.source import IntArray
from freescale.errors import DataError
from freescale.jagged import find_sorted

_MIN_INT64 = -(2**63)
_RUN_BATCHES = 64
_ROW_GROUP_WORDS = 1 << 16
# While they are put together and sorted, words are there three times, each with its hash, order and end.
_COPIES = 4
_BYTES_A_WORD = 8 + 8 + 8
SCHEMA = pa.schema([("id", pa.int64()), ("word", pa.string())])


class WordSorter:
    """Takes words with their hashes, again and again the same ones; gives each once, by ascending hash.

    Args:
        folder: where runs are spilled; made when the first one is, its parent must be there then.
        memory: bytes that words may take while they are sorted.
        what: what the words name, for messages.
    """

    def __init__(self, folder: Path, memory: int, *, what: str) -> None:
        self._folder, self._what = folder, what
        self._limit = max(1, memory // _COPIES)
        self._pending: list[_Words] = []
        self._pending_bytes = 0
        self._runs: list[_Run] = []
        self.num_written = 0

    def add(self, hashes: IntArray, words: Any) -> None:
        """Take the words of a chunk of events; those that no longer fit go to disk."""
        if not len(hashes):
            return
        some = self._unique(hashes, words.cast(pa.large_string()))
        self._pending.append(some)
        self._pending_bytes += some.num_bytes
        if self._pending_bytes < self._limit:
            return
        merged = self._merged(self._pending)
        # The same words come again and again: only where many are new is there something to spill.
        if merged.num_bytes > self._limit // 2:
            self._spill(merged)
            self._pending, self._pending_bytes = [], 0
        else:
            self._pending, self._pending_bytes = [merged], merged.num_bytes

    def write(self, path: Path, keep: IntArray | None = None) -> str:
        """Write the words of these ids (ascending), or all, as Parquet: id ascending, word; returns a digest."""
        digest = hashlib.blake2b(digest_size=8)
        self.num_written = 0
        with pq.ParquetWriter(path, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
            for words in self._blocks():
                kept = words if keep is None else words.among(keep)
                # The hash of a word stands for it: two words with one hash have been refused.
                self.num_written += len(kept.hashes)
                digest.update(kept.hashes.astype("<i8", copy=False).tobytes())
                table = pa.table([pa.array(kept.hashes), kept.words.cast(pa.string())], schema=SCHEMA)
                if table.num_rows:
                    writer.write_table(table, row_group_size=_ROW_GROUP_WORDS)
        return digest.hexdigest()

    def _blocks(self) -> Iterator[_Words]:
        """All words by ascending hash, in blocks that fit."""
        if not self._runs:
            if self._pending:
                yield self._merged(self._pending)
            return
        if self._pending:
            self._spill(self._merged(self._pending))
            self._pending = []
        starts = np.sort(np.concatenate([run.first for run in self._runs]))
        # One batch is a small part of a run, and each run may add one that straddles the border of a range.
        step = max(_RUN_BATCHES // 8, _RUN_BATCHES - len(self._runs), 1)
        lows = np.unique(np.append(starts[step::step], _MIN_INT64))
        for low, high in zip(lows.tolist(), [*(lows[1:] - 1).tolist(), 2**63 - 1]):
            parts = [part for run in self._runs if (part := run.read(low, high)) is not None]
            if parts:
                yield self._merged(parts)

    def _spill(self, words: _Words) -> None:
        self._folder.mkdir(exist_ok=True)
        self._runs.append(_write_run(self._folder / f"words-{len(self._runs):06d}.arrow", words))

    def _merged(self, parts: list[_Words]) -> _Words:
        hashes = np.concatenate([part.hashes for part in parts])
        words = pa.concat_arrays([part.words for part in parts])
        return self._unique(hashes, words)

    def _unique(self, hashes: IntArray, words: Any) -> _Words:
        """Each word once, by ascending hash; two words with one hash are refused."""
        order = np.argsort(hashes, kind="stable")
        ascending = hashes[order]
        again = ascending[1:] == ascending[:-1]
        twice = np.flatnonzero(again)
        if len(twice):
            one, other = (words.take(pa.array(order[twice + shift])) for shift in (0, 1))
            same = pc.equal(one, other)
            if not pc.all(same).as_py():
                first = pc.index(same, False).as_py()
                raise _collision(self._what, str(one[first]), str(other[first]))
        kept = np.concatenate([np.ones(min(1, len(order)), dtype=bool), ~again])
        return _Words(ascending[kept], words.take(pa.array(order[kept])))


class _Words(NamedTuple):
    """Words and their hashes."""

    hashes: IntArray
    words: Any

    @property
    def num_bytes(self) -> int:
        """Memory they take."""
        return int(self.words.nbytes) + _BYTES_A_WORD * len(self.hashes)

    def among(self, keep: IntArray) -> _Words:
        """Those whose hashes are among these, which ascend."""
        index = np.flatnonzero(find_sorted(keep, self.hashes)[1])
        return _Words(self.hashes[index], self.words.take(pa.array(index)))


class _Run(NamedTuple):
    """Sorted words on disk, in batches whose first and last hashes are known."""

    path: Path
    first: IntArray
    last: IntArray

    def read(self, low: int, high: int) -> _Words | None:
        """The words with hashes from low to high, both included."""
        start = int(np.searchsorted(self.last, low, side="left"))
        stop = int(np.searchsorted(self.first, high, side="right"))
        if start >= stop:
            return None
        # Read, not memory mapped: mapped pages would count as memory of this process.
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_file(file) as reader:
            table = pa.Table.from_batches([reader.get_batch(number) for number in range(start, stop)])
        hashes = table["id"].to_numpy()
        inside = slice(int(np.searchsorted(hashes, low)), int(np.searchsorted(hashes, high, side="right")))
        words = table["word"].combine_chunks()
        if isinstance(words, pa.ChunkedArray):
            words = pa.concat_arrays(words.chunks)
        return _Words(hashes[inside], words[inside])


def _write_run(path: Path, words: _Words) -> _Run:
    batch = pa.record_batch({"id": words.hashes, "word": words.words})
    size = -(-batch.num_rows // _RUN_BATCHES)
    starts = np.arange(0, batch.num_rows, size)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for start in starts.tolist():
            writer.write_batch(batch.slice(start, size))
    ends = np.append(starts[1:], batch.num_rows) - 1
    return _Run(path, words.hashes[starts], words.hashes[ends])


def _collision(what: str, one: str, other: str) -> DataError:
    return DataError(
        f"Two {what}s have the same 64-bit hash",
        got=f"{excerpt(one)!r} and {excerpt(other)!r}",
        allowed="different hashes: at 10 million words the odds against this are 370,000 to 1",
        next_step=f"give one of the two {what}s another name in the input",
    )
