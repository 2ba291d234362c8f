"""A snapshot of the tensors of a run, while training goes on changing them.

Everything but tables is copied aside at once, into memory that is kept from one checkpoint to the next. Tables are most
of a run and a step changes few of their rows: on a CPU they are read where they lie, and a row that is about to change
is kept as it was. On a GPU they are copied, too: to pinned memory of the host, tens of GB a second.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.embedding import EmbeddingTable
from freescale.train.state.shards import BLOCK, Buffer, Held, Piece, Source, lay_out

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Staging:
    """Memory that tensors are copied aside to. It is kept: only the first save waits for the system to hand it out."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._making: threading.Thread | None = None

    def reserve(self, num_bytes: int, *, device: torch.device) -> None:
        """Get the memory ready in the background, long before the first save."""
        self._making = threading.Thread(target=self._try, args=(num_bytes, device), daemon=True)
        self._making.start()

    def room(self, num_bytes: int, *, device: torch.device) -> Tensor:
        """This many bytes of the host, pinned where the tensors are on a GPU."""
        if self._making is not None:
            self._making.join()
            self._making = None
        if self._room is None or len(self._room) < num_bytes:
            self._make(num_bytes, device)
        assert self._room is not None
        return self._room[:num_bytes]

    def _try(self, num_bytes: int, device: torch.device) -> None:
        with contextlib.suppress(OSError):  # the save itself will tell
            self._make(num_bytes, device)

    def _make(self, num_bytes: int, device: torch.device) -> None:
        if self._room is not None and device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(self._room.data_ptr())
        self._room = None
        memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        room.zero_()  # pages are handed out on first use
        if device.type == "cuda":
            # The GPU copies into it by itself then; where the system refuses, copies are slower.
            with torch.cuda.device(device):  # a thread of its own starts on the first GPU
                torch.cuda.cudart().cudaHostRegister(room.data_ptr(), len(room), 0)
        self._room = room


class KeptRows:
    """Rows of a table as they were when the snapshot began, kept when training is about to change them."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table
        self._parts = {"weight": table.weight, **table.state}
        self._is_kept = torch.zeros(table.num_rows, dtype=torch.bool)
        self._kept: list[tuple[np.ndarray[Any, np.dtype[np.int64]], dict[str, Bytes]]] = []
        self._lock = threading.Lock()
        table.before_writing = self._keep

    def sources(self) -> dict[int, Source]:
        """What the table is made of, by address."""
        return {values.data_ptr(): _LiveRows(values, part, self) for part, values in self._parts.items()}

    def put_back(self, part: str, first: int, rows_of_bytes: Bytes) -> None:
        """In a copy of some rows, undo what training has changed meanwhile."""
        with self._lock:
            kept = list(self._kept)
        for rows, old in kept:
            inside = np.flatnonzero((rows >= first) & (rows < first + len(rows_of_bytes)))
            if len(inside):
                rows_of_bytes[rows[inside] - first] = old[part][inside]

    def close(self) -> None:
        """The snapshot is taken."""
        self._table.before_writing = None

    def _keep(self, rows: Tensor) -> None:
        with self._lock:
            new = rows[~self._is_kept[rows]]
            if len(new):
                self._is_kept[new] = True
                old = {part: _rows_of_bytes(values[new]) for part, values in self._parts.items()}
                self._kept.append((new.numpy(), old))


class _LiveRows:
    """Rows of a table that training goes on with: a source of bytes as they were."""

    def __init__(self, values: Tensor, part: str, kept: KeptRows) -> None:
        self._bytes = _rows_of_bytes(values)
        self._part = part
        self._kept = kept
        self._local = threading.local()

    @property
    def num_bytes(self) -> int:
        return self._bytes.size

    def read(self, begin: int, end: int) -> Buffer:
        width = self._bytes.shape[1]
        first, last = begin // width, -(-end // width)
        copy = self._copy_room(last - first, width)
        np.copyto(copy, self._bytes[first:last])
        # Only now: whatever has changed a row since has been told of it before.
        self._kept.put_back(self._part, first, copy)
        return copy.reshape(-1).data[begin - first * width : end - first * width]

    def _copy_room(self, rows: int, width: int) -> Bytes:
        room = getattr(self._local, "room", None)
        if room is None:
            room = self._local.room = np.empty(BLOCK + 2 * width, dtype=np.uint8)
        needed: Bytes = room[: rows * width].reshape(rows, width)
        return needed


class Snapshot:
    """The bytes of some pieces at one moment, in the order in which a shard has them.

    Args:
        pieces: what this rank writes.
        tables: tables among them that are changed by their own methods alone.
        staging: where everything else is copied.
    """

    def __init__(self, pieces: Sequence[Piece], tables: Iterable[EmbeddingTable], staging: Staging) -> None:
        written = {piece.values.data_ptr() for piece in pieces if piece.rows}
        on_cpu = [table for table in tables if table.num_rows and table.weight.device.type == "cpu"]
        self._kept = [KeptRows(table) for table in on_cpu if table.weight.data_ptr() in written]
        live = {address: source for kept in self._kept for address, source in kept.sources().items()}
        # Wide numbers first, so that each lies at a multiple of its width; then what is copied, in one stretch.
        self.pieces = sorted(pieces, key=lambda piece: (-piece.values.element_size(), _is_live(piece, live)))
        header, self.positions = lay_out(self.pieces)
        self.sources: list[Source] = [Held(header)]
        try:
            copied = _copy_aside([piece for piece in self.pieces if not _is_live(piece, live)], staging)
        except BaseException:
            self.close()
            raise
        for is_live, group in itertools.groupby(self.pieces, lambda piece: _is_live(piece, live)):
            if is_live:
                self.sources += [live[piece.values.data_ptr()] for piece in group]
            else:
                num_bytes = sum(piece.num_bytes for piece in group)
                self.sources.append(Held(copied[:num_bytes].numpy()))
                copied = copied[num_bytes:]

    def close(self) -> None:
        """Everything has been read: rows need not be kept any longer."""
        for kept in self._kept:
            kept.close()


def _is_live(piece: Piece, live: dict[int, Source]) -> bool:
    source = live.get(piece.values.data_ptr())
    return source is not None and piece.values.is_contiguous() and source.num_bytes == piece.num_bytes


def _copy_aside(pieces: Sequence[Piece], staging: Staging) -> Tensor:
    """The bytes of the pieces, one after the other in the staging memory; the copy is done when this returns."""
    device = next((piece.values.device for piece in pieces if piece.values.is_cuda), torch.device("cpu"))
    room = staging.room(sum(piece.num_bytes for piece in pieces), device=device)
    begin = 0
    for piece in pieces:
        part = room[begin : begin + piece.num_bytes]
        part.view(piece.values.dtype).view(piece.values.shape).copy_(piece.values, non_blocking=True)
        begin += piece.num_bytes
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return room


def _rows_of_bytes(values: Tensor) -> Bytes:
    rows: Bytes = values.contiguous().view(torch.uint8).view(len(values), -1).numpy()
    return rows
