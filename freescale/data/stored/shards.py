"""Shards: the Parquet files of a data set, here or elsewhere, written by `prepare` or by others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.stored.digest import digest_footer, sample_file
from freescale.data.stored.manifest import DATASET_FILE, SHARD_DIGEST, damaged
from freescale.data.stored.storage import FolderCache, is_address, local_path, sizes

# Of a shard that was prepared without a digest: a MiB of 64.
_SAMPLED_BLOCKS = 16


@dataclass(frozen=True)
class Shard:
    """One Parquet file of the data set and what the manifest promises of it.

    Args:
        path: where it is, or where its copy will be.
        row_groups: rows of each.
        num_bytes: of the file.
        digest: of the values in it, taken when it was written or indexed.
        footer: digest of its end, where others have written it.
        name: its path below the folder of the data set.
        store: keeps copies, where it lives elsewhere.
    """

    path: Path
    row_groups: tuple[int, ...]
    num_bytes: int | None
    digest: str | None
    footer: str | None = None
    name: str = ""
    store: FolderCache | None = None

    def check(self) -> None:
        """Find a missing, cut-off or exchanged file now, not in the middle of an epoch."""
        try:
            num_bytes = self.path.stat().st_size
            with self.path.open("rb") as file:
                file.seek(max(0, num_bytes - 4))
                complete = file.read(4) == b"PAR1"
        except OSError as error:
            raise damaged(self.path, f"it cannot be opened ({error.strerror})") from error
        if self.num_bytes is not None and num_bytes != self.num_bytes:
            raise damaged(self.path, f"it has {num_bytes} bytes, {DATASET_FILE} says {self.num_bytes}")
        if not complete:
            raise damaged(self.path, "it does not end like a Parquet file: it was cut off")
        if self.footer is not None:
            same = self.footer == digest_footer(self.path)
        else:
            same = self.digest is None or self.digest == self._own_digest()
        if not same:
            raise damaged(self.path, f"it holds other histories than {DATASET_FILE} says")

    def contents(self) -> str:
        """What stands for the histories in it."""
        if self.digest is not None:
            return f"written:{self.digest}"
        self.fetch()
        return sample_file(self.path, num_blocks=_SAMPLED_BLOCKS)

    def fetch(self) -> None:
        """See to it that the file is here."""
        if self.store is None:
            return
        try:
            self.store.fetch(self.name, num_bytes=self.num_bytes)
        except FileNotFoundError as error:
            raise damaged(self.path, f"it is not at {self.store.address}") from error
        self.check()

    def _own_digest(self) -> str | None:
        """What the file says of itself; no history is read for it."""
        try:
            metadata = pq.read_metadata(self.path).metadata or {}
        except (OSError, pa.ArrowException) as error:
            raise damaged(self.path, str(error)) from error
        return metadata.get(SHARD_DIGEST.encode(), b"").decode(errors="replace") or None

    def open(self) -> Any:
        """The open Parquet file, its footer compared with the manifest."""
        self.fetch()
        try:
            file = pq.ParquetFile(self.path, page_checksum_verification=True, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self.path, str(error)) from error
        rows = tuple(file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups))
        if rows != self.row_groups:
            raise damaged(self.path, f"its row groups are not those of {DATASET_FILE}")
        return file


def shards_of(
    manifest: dict[str, Any], folder: Path, store: FolderCache | None, *, limit_gb: float
) -> list[Shard]:
    """The shards a manifest tells of, checked as far as that costs little.

    Args:
        manifest: of the data set.
        folder: where it is, or where its index has been copied to.
        store: copies of the files of the folder, where it lives elsewhere.
        limit_gb: of copies, where the manifest points at files elsewhere.
    """
    root = manifest.get("root")
    if root is not None:
        # Histories that others have written stay where they are.
        away = is_address(root)
        store = FolderCache(root, version=str(manifest.get("catalogue")), limit_gb=limit_gb) if away else None
        folder = store.folder if store else local_path(root)
    shards = [_shard_of(folder, entry, store, below=root is not None) for entry in manifest["shards"]]
    if store is None:
        for shard in shards:
            shard.check()
    else:
        _check_sizes(shards, store)
    return shards


def _shard_of(folder: Path, entry: Any, store: FolderCache | None, *, below: bool) -> Shard:
    try:
        # Only the name counts: a manifest must not lead out of its folder. Files of others may lie below it.
        name = PurePosixPath(entry["file"])
        if not below or ".." in name.parts or name.is_absolute():
            name = PurePosixPath(name.name)
        rows = tuple(int(n) for n in entry["row_groups"])
        return Shard(
            folder / name,
            rows,
            entry.get("bytes"),
            entry.get("digest"),
            entry.get("footer"),
            str(name),
            store,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder / DATASET_FILE, f"shard entry {entry!r}") from error


def _check_sizes(shards: list[Shard], store: FolderCache) -> None:
    """Of files elsewhere only the sizes are asked for; each is checked when it has been copied."""
    found = sizes(store.address)
    for shard in shards:
        if shard.name not in found:
            raise damaged(shard.path, f"it is not at {store.address}")
        if shard.num_bytes not in (None, found[shard.name]):
            raise damaged(
                shard.path, f"it has {found[shard.name]} bytes at {store.address}, not {shard.num_bytes}"
            )
