"""Shards: what a rank holds of the tensors of a run, as one safetensors file, and the CRC of each of its blocks.

The file is written straight from memory by several threads, each of them taking the CRC of what it writes: nothing is
read again. Every rank writes what it alone has; of what all of them have, each writes a part.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError

BLOCK = 1 << 24
"""Bytes with a CRC of their own: what is read to check any one of them."""
THREADS = min(8, 2 * (os.cpu_count() or 1))
"""A CRC takes about a second a GB, so that one thread would be slower than a disk."""
ALIGN = 4096
"""What disks want addresses in memory and in files to be multiples of."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor: consecutive rows, or all of it.

    Args:
        name: of the tensor.
        values: the rows.
        first: number of the first in the whole.
        shape: of the whole.
    """

    name: str
    values: Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many; a single number counts as one."""
        return len(self.values) if self.values.dim() else 1

    @property
    def num_bytes(self) -> int:
        """Of the rows."""
        return self.values.numel() * self.values.element_size()


class Source(Protocol):
    """Bytes that go into a shard."""

    @property
    def num_bytes(self) -> int:
        """How many."""

    def read(self, begin: int, end: int, into: Bytes) -> None:
        """Copy some of them."""


class Held:
    """Bytes that stay as they are while they are written."""

    def __init__(self, content: Bytes) -> None:
        self._content = content

    @property
    def num_bytes(self) -> int:
        """How many."""
        return len(self._content)

    def read(self, begin: int, end: int, into: Bytes) -> None:
        """Copy some of them."""
        np.copyto(into, self._content[begin:end])


def piece_of(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of a tensor, plain or cut by rows over the ranks."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"a checkpoint cannot hold {name}", got=tensor.dtype, allowed=", ".join(map(str, DTYPES))
        )
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor.detach(), 0, tuple(tensor.shape))
    if list(tensor.placements) != [Shard(0)]:
        raise CheckpointError(
            f"a checkpoint cannot hold {name}, which is not cut by rows over the ranks",
            got=tensor.placements,
            allowed="plain tensors, the same on every rank, or DTensors with [Shard(0)]",
        )
    (chunk,) = tensor.__create_chunk_list__()
    return Piece(name, tensor.to_local().detach(), int(chunk.offsets[0]), tuple(tensor.shape))


def pieces_to_write(tensors: Mapping[str, Tensor], *, ranks: Ranks) -> list[Piece]:
    """This rank's part of all tensors: its own rows, and a share of what every rank has, alike by bytes."""
    pieces = [piece_of(name, tensor) for name, tensor in tensors.items()]
    alike = [piece for piece in pieces if not isinstance(tensors[piece.name], DTensor)]
    load, mine = [0] * ranks.num_ranks, set()
    for piece in sorted(alike, key=lambda piece: (-piece.num_bytes, piece.name)):
        rank = load.index(min(load))
        load[rank] += piece.num_bytes + 1
        if rank == ranks.rank:
            mine.add(piece.name)
    return [
        piece
        for piece in pieces
        if (piece.name in mine if not isinstance(tensors[piece.name], DTensor) else piece.rows)
    ]


def lay_out(pieces: Sequence[Piece]) -> tuple[bytes, dict[str, int]]:
    """The header of a shard with these pieces one after the other, and where in the file each begins.

    The wider a number, the earlier it must come: then each lies at a multiple of its width.
    """
    begin, offsets, header = 0, {}, {}
    for piece in pieces:
        end = begin + piece.num_bytes
        header[piece.name] = {
            "dtype": DTYPES[piece.values.dtype],
            "shape": list(piece.values.shape),
            "data_offsets": [begin, end],
        }
        offsets[piece.name] = begin
        begin = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + at for name, at in offsets.items()}


def describe_pieces(pieces: Sequence[Piece], positions: Mapping[str, int], file: str) -> dict[str, Any]:
    """Pieces as meta.json lists them: by tensor its type and shape, and (file, first row, rows, position)."""
    return {
        piece.name: {
            "dtype": DTYPES[piece.values.dtype],
            "shape": list(piece.shape),
            "pieces": [[file, piece.first, piece.rows, positions[piece.name]]],
        }
        for piece in pieces
    }


def write_shard(path: Path, sources: Sequence[Source]) -> dict[str, Any]:
    """Write these bytes one after the other, durably; returns the file's size and the CRCs of its blocks."""
    starts = list(itertools.accumulate((source.num_bytes for source in sources), initial=0))
    size, local = starts[-1], threading.local()

    def write(begin: int) -> int:
        block, end = _block_of(local), min(begin + BLOCK, size)
        for source, start in zip(sources, starts):
            first, last = max(begin - start, 0), min(end - start, source.num_bytes)
            if first < last:
                source.read(first, last, block[start + first - begin : start + last - begin])
        file.write(block, end - begin, at=begin)
        return zlib.crc32(block[: end - begin].data)

    with (
        BlockFile(path, size, past_the_cache=size >= BLOCK and BLOCK % ALIGN == 0) as file,
        ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool,
    ):
        crcs = list(pool.map(write, range(0, size, BLOCK)))
    return {"size": size, "block": BLOCK, "crcs": crcs}


class BlockFile:
    """A new file written block by block, on disk when it is closed.

    Where the file system lets us, blocks go past the page cache: filling it took 2.5 s of CPU a GB, and writing past it
    0.15 s, on a small virtual machine; and it pushes out what others need.

    Args:
        path: the file.
        size: it will have.
        past_the_cache: blocks begin at multiples of `ALIGN` in file and memory, and may be read beyond their end.
    """

    def __init__(self, path: Path, size: int, *, past_the_cache: bool) -> None:
        self._size = size
        self._direct = getattr(os, "O_DIRECT", 0) if past_the_cache else 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | self._direct, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor, self._direct = os.open(path, flags, 0o644), 0

    def write(self, block: Bytes, length: int, *, at: int) -> None:
        """The first bytes of a block."""
        done = 0
        while done < length:
            end = -(-length // ALIGN) * ALIGN if self._direct else length
            try:
                written = os.pwrite(self._descriptor, block[done:end].data, at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._use_the_cache()
                continue
            if self._direct and written < end - done:
                self._use_the_cache()  # nearly full: let the last bytes tell
            done += written

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _use_the_cache(self) -> None:
        """This file system wants other addresses than ours."""
        import fcntl

        self._direct = 0
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _block_of(local: threading.local) -> Bytes:
    """Memory for one block, a thread's own, at an address that a disk can read from."""
    if not hasattr(local, "block"):
        local.block = np.frombuffer(mmap.mmap(-1, BLOCK), dtype=np.uint8)
    block: Bytes = local.block
    return block
