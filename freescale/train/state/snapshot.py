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

import numpy as np
import torch
from torch import Tensor

from freescale.embedding import EmbeddingTable
from freescale.train.state.shards import Bytes, Held, Piece, Source, lay_out


class _HostMemory(mmap.mmap):
    """Memory of the host, given back to the system when nobody holds it any more; before, the driver lets go of it.

    A driver that still thinks it owns these addresses would copy to and from the pages that once were there, whatever
    lies there by then.
    """

    _pinned: tuple[int, torch.device] | None = None

    def pin(self, address: int, num_bytes: int, device: torch.device) -> None:
        """Let a GPU copy into it by itself; where the system refuses, copies are slower."""
        with torch.cuda.device(device):  # a thread of its own starts on the first GPU
            if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
                self._pinned = (address, device)

    def __del__(self) -> None:
        if self._pinned is not None:
            address, device = self._pinned
            with contextlib.suppress(Exception), torch.cuda.device(device):  # the driver may have gone before
                torch.cuda.cudart().cudaHostUnregister(address)


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
        self._room = None
        memory = _HostMemory(-1, max(num_bytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        room.zero_()  # pages are handed out on first use
        if device.type == "cuda":
            memory.pin(room.data_ptr(), len(room), device)
        self._room = room


class KeptRows:
    """Rows of a table as they were when the snapshot began, kept when training is about to change them."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table
        self._live = {
            part: _rows_of_bytes(values) for part, values in {"weight": table.weight, **table.state}.items()
        }
        self._kept = {part: live[:0] for part, live in self._live.items()}
        self._count = 0
        self._number = np.zeros(table.num_rows, dtype=np.int64)  # by row, its number among those kept, from 1
        self._lock = threading.Lock()
        table.before_writing = self._keep

    def sources(self) -> dict[int, Source]:
        """What the table is made of, by address."""
        return {live.ctypes.data: _LiveRows(live, part, self) for part, live in self._live.items()}

    def put_back(self, part: str, first: int, copy: Bytes) -> None:
        """In a copy of some rows, undo what training has changed meanwhile."""
        with self._lock:
            kept, number = self._kept[part], self._number[first : first + len(copy)].copy()
        changed = np.flatnonzero(number)
        copy[changed] = kept[number[changed] - 1]

    def close(self) -> None:
        """The snapshot is taken."""
        self._table.before_writing = None

    def _keep(self, rows: Tensor) -> None:
        with self._lock:
            asked = rows.numpy()
            new = asked[self._number[asked] == 0]
            begin, end = self._count, self._count + len(new)
            for part, live in self._live.items():
                if end > len(self._kept[part]):
                    self._kept[part] = _longer(self._kept[part], max(end, 2 * begin), live.shape[1])
                np.take(live, new, axis=0, out=self._kept[part][begin:end], mode="clip")
            self._number[new] = np.arange(begin + 1, end + 1)
            self._count = end


class _LiveRows:
    """Rows of a table that training goes on with: a source of bytes as they were."""

    def __init__(self, live: Bytes, part: str, kept: KeptRows) -> None:
        self._live = live
        self._part = part
        self._kept = kept

    @property
    def num_bytes(self) -> int:
        return self._live.size

    def read(self, begin: int, end: int, into: Bytes) -> None:
        """Whole rows where they go; those cut by an end of the block by way of a copy."""
        width = self._live.shape[1]
        first, last = -(-begin // width), end // width
        if first > last:  # within one row
            into[:] = self._rows(last, first)[0, begin - last * width : end - last * width]
            return
        before, after = first * width - begin, end - last * width
        if before:
            into[:before] = self._rows(first - 1, first)[0, -before:]
        self._rows(first, last, into=into[before : len(into) - after].reshape(last - first, width))
        if after:
            into[-after:] = self._rows(last, last + 1)[0, :after]

    def _rows(self, first: int, last: int, *, into: Bytes | None = None) -> Bytes:
        copy = np.empty((last - first, self._live.shape[1]), dtype=np.uint8) if into is None else into
        np.copyto(copy, self._live[first:last])
        # Only now: whatever has changed a row since has been told of it before.
        self._kept.put_back(self._part, first, copy)
        return copy


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
        self.sources: list[Source] = [Held(np.frombuffer(header, dtype=np.uint8))]
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
    rows: Bytes = values.view(torch.uint8).view(len(values), -1).numpy()
    return rows


def _longer(rows: Bytes, length: int, width: int) -> Bytes:
    longer = np.empty((length, width), dtype=np.uint8)
    longer[: len(rows)] = rows
    return longer
