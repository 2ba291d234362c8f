"""Fills tensors from the shards of a checkpoint: every rank reads the rows it holds, and checks what it reads.

A block is read once, by several threads, straight into its tensor where it can be, and its CRC is compared before the
load counts. Any number of ranks can load what any number has saved.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.train.state.shards import DTYPES, THREADS, Piece, piece_of

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class DoesNotFitError(Exception):
    """The tensors of a checkpoint are not those asked for."""


class ChangedError(Exception):
    """A shard is not as it was written."""


class Target:
    """Where the rows of a tensor go that this rank holds; filled by bytes."""

    def __init__(self, piece: Piece, saved: torch.dtype) -> None:
        self._values = piece.values
        as_saved = piece.values.is_contiguous() and piece.values.dtype == saved
        self._filled = piece.values if as_saved else torch.empty(piece.values.shape, dtype=saved)
        flat = self._filled.reshape(-1).view(torch.uint8)
        self._bytes = flat
        self.memory: memoryview | None = None if flat.is_cuda else flat.numpy().data
        """The bytes themselves, where a file can be read into them."""

    def put(self, at: int, content: Tensor) -> None:
        """Some bytes, from this one on."""
        self._bytes[at : at + len(content)].copy_(content)

    def finish(self) -> None:
        """All bytes are here."""
        if self._filled is not self._values:
            self._values.copy_(self._filled)


@dataclass(frozen=True)
class Slice:
    """Consecutive bytes of a shard that one target needs.

    Args:
        begin: in the file.
        end: in the file.
        target: who needs them.
        at: the first one's place there.
    """

    begin: int
    end: int
    target: Target
    at: int


def fill(folder: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors (plain or sharded) in place.

    Raises:
        DoesNotFitError: a tensor is not there, or has another shape.
        ChangedError: a shard is missing, shorter, or has another CRC.
    """
    targets, slices = [], defaultdict(list)
    for name, tensor in tensors.items():
        piece = piece_of(name, tensor)
        saved = meta["tensors"].get(name)
        if saved is None:
            raise DoesNotFitError(f"it has no {name}")
        if tuple(saved["shape"]) != piece.shape:
            raise DoesNotFitError(f"{name} has the shape {tuple(saved['shape'])} there, {piece.shape} here")
        if piece.rows:
            target = Target(piece, _TYPES[saved["dtype"]])
            targets.append(target)
            for file, part in _slices(piece, saved, target):
                slices[file].append(part)
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    _read_all(folder, meta["files"], slices, device=device)
    for target in targets:
        target.finish()


def _slices(piece: Piece, saved: Mapping[str, Any], target: Target) -> Iterator[tuple[str, Slice]]:
    """Where the rows of a piece lie in the shards."""
    width = piece.values[0].numel() if piece.values.dim() else 1
    width *= _TYPES[saved["dtype"]].itemsize
    for file, first, rows, position in saved["pieces"]:
        begin, end = max(piece.first, first), min(piece.first + piece.rows, first + rows)
        if begin < end and width:
            start = position + (begin - first) * width
            yield file, Slice(start, start + (end - begin) * width, target, (begin - piece.first) * width)


def _read_all(
    folder: Path,
    files: Mapping[str, Any],
    slices: Mapping[str, list[Slice]],
    *,
    device: torch.device | None,
) -> None:
    local = threading.local()
    work = [
        (folder / file, files[file], number, parts)
        for file, wanted in slices.items()
        for number, parts in sorted(_by_block(wanted, files[file]["block"]).items())
    ]
    # Threads start on the first GPU, which may be another rank's.
    start = None if device is None else lambda: torch.cuda.set_device(device)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="resume", initializer=start) as pool:
        done = [pool.submit(_read_block, *one, local) for one in work]
        try:
            for one in done:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _by_block(slices: list[Slice], block: int) -> dict[int, list[Slice]]:
    blocks = defaultdict(list)
    for part in slices:
        for number in range(part.begin // block, (part.end - 1) // block + 1):
            blocks[number].append(part)
    return blocks


def _read_block(path: Path, facts: Mapping[str, Any], number: int, parts: list[Slice], local: Any) -> None:
    """Read a block, check it, and hand its bytes to those who need them."""
    begin = number * facts["block"]
    end = min(begin + facts["block"], facts["size"])
    only = parts[0]
    if only.begin <= begin and end <= only.end and only.target.memory is not None and len(parts) == 1:
        memory, room = only.target.memory[only.at + begin - only.begin :][: end - begin], None
    else:
        room = _room(local, facts["block"], pinned=any(part.target.memory is None for part in parts))
        memory = room.numpy().data[: end - begin]
    if _read_at(path, memory, begin) < end - begin:
        raise ChangedError(f"{path.name} is shorter than it was written")
    if facts["crcs"] and zlib.crc32(memory) != facts["crcs"][number]:
        raise ChangedError(f"{path.name} has changed since it was written")
    if room is not None:
        for part in parts:
            first, last = max(begin, part.begin), min(end, part.end)
            part.target.put(part.at + first - part.begin, room[first - begin : last - begin])


def _room(local: Any, num_bytes: int, *, pinned: bool) -> Tensor:
    """Memory for one block, a thread's own; pinned where it goes on to a GPU."""
    room: Tensor | None = getattr(local, "room", None)
    if room is None or len(room) < num_bytes:
        room = local.room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    return room


def _read_at(path: Path, memory: memoryview, position: int) -> int:
    """Fill the memory from a file, from a position on; how many bytes there were."""
    try:
        descriptor = os.open(path, os.O_RDONLY)  # for each block: a thousand ranks may have a thousand shards
    except FileNotFoundError:
        raise ChangedError(f"{path.name} is missing") from None
    done = 0
    try:
        while done < len(memory) and (read := os.preadv(descriptor, [memory[done:]], position + done)):
            done += read
    finally:
        os.close(descriptor)
    return done


# Format 1, which torch.distributed.checkpoint wrote: pieces are listed in the headers, and a file has one CRC.


def index_of_headers(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """The pieces of a checkpoint of format 1, as format 2 lists them."""
    tensors: dict[str, Any] = {}
    for file in files:
        header, start = _read_header(folder / file)
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, facts in header.items():
            first, shape = next(iter(offsets[name]["saved_offsets"]), 0), facts["shape"]
            rows = shape[0] if shape else 1
            known = tensors.setdefault(name, {"dtype": facts["dtype"], "shape": shape, "pieces": []})
            known["pieces"].append([file, first, rows, start + facts["data_offsets"][0]])
            if shape:
                known["shape"] = [max(known["shape"][0], first + rows), *shape[1:]]
    return tensors


def crc_of_file(path: Path) -> int:
    """One CRC over all bytes."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
