"""Shards: what a rank holds of the tensors of a run, as one safetensors file, and the CRC of each of its blocks.

The file is written straight from memory by several threads, each of them taking the CRC of what it writes: nothing is
read again. Every rank writes what it alone has; of what all of them have, each writes a part.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from freescale.comm.world import Ranks
from freescale.errors import CheckpointError

BLOCK = 1 << 24
"""Bytes with a CRC of their own: what is read to check any one of them."""
THREADS = min(8, 2 * (os.cpu_count() or 1))
"""A CRC takes about a second a GB, so that one thread would be slower than a disk."""
_ALIGN = 4096
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
Buffer = memoryview


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

    def read(self, begin: int, end: int) -> Buffer:
        """Some of them; valid until the same thread reads again."""


class Held:
    """Bytes that stay as they are while they are written."""

    def __init__(self, content: Any) -> None:
        self._content = memoryview(content).cast("B")

    @property
    def num_bytes(self) -> int:
        """How many."""
        return len(self._content)

    def read(self, begin: int, end: int) -> Buffer:
        """Some of them, where they lie."""
        return self._content[begin:end]


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
    text += b" " * (-(8 + len(text)) % _ALIGN)
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
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + source.num_bytes)
    size = starts[-1]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(begin: int) -> int:
        crc, end = 0, min(begin + BLOCK, size)
        for source, start in zip(sources, starts):
            first, last = max(begin - start, 0), min(end - start, source.num_bytes)
            if first < last:
                part = source.read(first, last)
                crc = zlib.crc32(part, crc)
                _write_at(descriptor, part, start + first)
        return crc

    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
            crcs = list(pool.map(write, range(0, size, BLOCK)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "block": BLOCK, "crcs": crcs}


def _write_at(descriptor: int, part: Buffer, position: int) -> None:
    while part:
        written = os.pwrite(descriptor, part, position)
        part, position = part[written:], position + written
