"""What a data set holds, as a few short digests: ranks compare them before the first step, checkpoints keep them.

Everything that batches are planned from is hashed whole: lengths, row groups, the catalogue. Histories themselves may
be larger than anybody wants to read before the first step, so a source says itself what stands for them:

    prepared folder     a digest of the decoded values of every shard, taken when it was written; kept in dataset.json
                        and in the shard, compared with each other on opening. Checksums of its pages are compared
                        when they are read
    prepared before     size and 16 blocks of 64 KiB of every shard; the whole of a small one
    any other source    all its histories up to a million events, beyond that 4,096 spread evenly
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from freescale.data.schema.feature import legacy_schema
from freescale.data.source import IntArray, SequenceSource

_BLOCK = 64 << 10
_READ_WHOLE = 1_000_000
_READ_HISTORIES = 4096
_NUM_PARTS = 16


@runtime_checkable
class DigestedSource(Protocol):
    """A source that can say what it holds without reading it."""

    def digests(self) -> Mapping[str, str]:
        """Part of the histories -> a text that is the same for the same histories only."""


@dataclass(frozen=True, kw_only=True)
class DataDigest:
    """What a data set holds, in short.

    Args:
        name: what it is called; the only thing here that may differ.
        histories: how many.
        events: how many.
        items: how many.
        features: of an event.
        lengths: of histories, in their order.
        groups: which rows are stored together, as these are shuffled together.
        catalogue: ids of items and how often they occur.
        content: what is known of items besides; "" for nothing.
        parts: the histories themselves, by the part they lie in.
        schema: of the features, and their statistics; "" where there is none.
    """

    name: str
    histories: int
    events: int
    items: int
    features: tuple[str, ...]
    lengths: str
    groups: str
    catalogue: str
    content: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    schema: str = ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataDigest:
        """What a checkpoint has kept."""
        return cls(**{**state, "features": tuple(state["features"])})

    @property
    def fingerprint(self) -> str:
        """All of it but the name in one number."""
        state = {**self.state(), "name": "", "parts": list(self.parts.items())}  # their order counts, too
        return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=8).hexdigest()


def digest_data(source: SequenceSource, *, content: str = "") -> DataDigest:
    """What a source holds; `content` stands for what is known of items besides."""
    lengths, items = source.lengths, source.items
    return DataDigest(
        name=source.name,
        histories=len(lengths),
        events=int(np.sum(lengths)),
        items=len(items.ids),
        features=tuple(source.features),
        lengths=digest_arrays(lengths),
        groups=digest_arrays(source.groups),
        catalogue=digest_arrays(items.ids, items.counts, items.train_counts),
        content=content,
        parts=digest_parts(source),
        schema=_digest_schema(source),
    )


def _digest_schema(source: SequenceSource) -> str:
    """Of what a source says of its features, if that is more than any other has."""
    schema = getattr(source, "schema", None)
    if schema is None or schema.words() == legacy_schema(source.features).words():
        return ""
    said = json.dumps([schema.words(), getattr(source, "statistics", {})], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def digest_parts(source: SequenceSource) -> dict[str, str]:
    """What stands for the histories of a source, by the part they lie in."""
    return dict(source.digests()) if isinstance(source, DigestedSource) else _digest_histories(source)


def differences(one: DataDigest, other: DataDigest, *, where: tuple[str, str]) -> list[str]:
    """How two data sets differ, in words; counts first, and the first shard that differs.

    Digests of different making ("written:...", "sampled:...") say nothing about each other.

    Args:
        one: a data set.
        other: another one.
        where: what to call the places of the two.
    """
    found = [
        f"{name}: {first:,} {where[0]}, {second:,} {where[1]}"
        for name in ("histories", "events", "items")
        for first, second in [(getattr(one, name), getattr(other, name))]
        if first != second
    ]
    if one.features != other.features:
        found.append(f"features: {_listed(one.features)} {where[0]}, {_listed(other.features)} {where[1]}")
    in_words = {
        "lengths": "the lengths of the histories, or their order",
        "groups": "which rows are stored together",
        "catalogue": "the items, or how often they occur",
        "schema": "the schema of its features, or their statistics",
        "content": "the content vectors or texts of the items",
    }
    found += [words for name, words in in_words.items() if getattr(one, name) != getattr(other, name)]
    making = {text.partition(":")[0] for text in [*one.parts.values(), *other.parts.values()]}
    names = list(dict.fromkeys([*one.parts, *other.parts])) if len(making) == 1 else []
    parts = [name for name in names if one.parts.get(name) != other.parts.get(name)]
    if parts:
        found.append(f"what is in {parts[0]}" + (f" and {len(parts) - 1} more" if len(parts) > 1 else ""))
    elif names and list(one.parts) != list(other.parts):
        firsts = next(iter(one.parts)), next(iter(other.parts))
        found.append(f"the order of its parts: {firsts[0]} first {where[0]}, {firsts[1]} {where[1]}")
    return found


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def digest_arrays(*arrays: npt.NDArray[Any]) -> str:
    """Of the values of arrays, whatever machine they are on."""
    digest = hashlib.blake2b(digest_size=8)
    add_arrays(digest, *arrays)
    return digest.hexdigest()


def add_arrays(digest: Any, *arrays: npt.NDArray[Any]) -> None:
    """Go on with the values of more arrays."""
    for array in arrays:
        values = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(values.reshape(-1).view(np.uint8))


def sample_file(path: Path, *, num_blocks: int) -> str:
    """Of the size of a file and of blocks spread over it, its beginning and its end among them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    whole = size <= num_blocks * _BLOCK
    starts = range(0, size, _BLOCK) if whole else np.linspace(0, size - _BLOCK, num_blocks, dtype=np.int64)
    with path.open("rb", buffering=0) as file:
        for start in starts:
            file.seek(int(start))
            digest.update(file.read(_BLOCK))
    return f"sampled:{digest.hexdigest()}"


def digest_footer(path: Path) -> str:
    """Of the end of a Parquet file, which says where every page lies and how large it is."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return hashlib.blake2b(file.read(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class FileStamp:
    """How a file looked when its digest was taken; another look means other contents, or the same written again."""

    size: int
    changed_ns: int
    number: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """As it looks now."""
        stat = os.stat(path)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _digest_histories(source: SequenceSource) -> dict[str, str]:
    """Of a source that says nothing itself: of histories read from it."""
    num_rows = len(source.lengths)
    rows: IntArray = np.arange(num_rows)
    if int(np.sum(source.lengths)) > _READ_WHOLE:
        rows = np.unique(np.linspace(0, num_rows - 1, _READ_HISTORIES, dtype=np.int64))
    parts = {}
    for part in np.array_split(rows, min(_NUM_PARTS, len(rows))):
        read = source.read(part)
        more = [name for name in sorted(read.columns) if name not in source.features]
        columns = [read.columns[name] for name in (*source.features, *more)]
        columns += [read.user_columns[name] for name in sorted(read.user_columns)]
        parts[f"histories {part[0]} to {part[-1]}"] = (
            f"read:{digest_arrays(read.users, read.offsets, *columns)}"
        )
    return parts
