"""Files that live elsewhere: s3://, gs://, any file system of pyarrow or fsspec, copied here piece by piece and kept.

A file is copied as a whole, in bounded memory, the first time it is asked for; copies that have not been used for
longest make room. Ranks of one machine share them. An address may carry options of pyarrow's file systems:

    s3://bucket/data?region=eu-west-1&endpoint_override=localhost:9000&scheme=http
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from freescale.data.stored.item_content import CONTENT_FILE
from freescale.data.stored.item_texts import TEXTS_FILE
from freescale.data.stored.manifest import DATASET_FILE, ITEMS_FILE, LENGTHS_FILE, words_file
from freescale.errors import DataError

CACHE_VARIABLE = "FREESCALE_CACHE"
INDEX_FILES = (LENGTHS_FILE, ITEMS_FILE, TEXTS_FILE, CONTENT_FILE)
_BLOCK = 8 << 20
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
# File systems have threads of their own, which a fork leaves behind: a forked loader process would wait for ever.
_first_process = os.getpid()


def is_address(path: str | Path) -> bool:
    """Whether this names something on another file system."""
    return bool(_SCHEME.match(str(path))) and not str(path).startswith("file://")


def local_path(path: str | Path) -> Path:
    """A path on this machine, also where it is written as file://."""
    return Path(unquote(urlsplit(str(path)).path)) if str(path).startswith("file://") else Path(path)


def cache_folder() -> Path:
    """Where copies are kept: $FREESCALE_CACHE, or .cache/freescale of the user."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "freescale")


def read_small(address: str, name: str) -> bytes:
    """A whole file of a folder elsewhere; FileNotFoundError where there is none."""
    system, base = _resolve(address)
    with _told(address), system.open_input_stream(_join(base, name)) as stream:
        return stream.read()


def sizes(address: str) -> dict[str, int]:
    """The files at an address, by their path below it, and their bytes; "" for the address itself if it is a file."""
    from pyarrow.fs import FileSelector, FileType

    system, base = _resolve(address)
    with _told(address):
        info = system.get_file_info(base)
        if info.type == FileType.File:
            return {"": info.size}
        found = system.get_file_info(FileSelector(base, recursive=True, allow_not_found=True))
    prefix = base.rstrip("/") + "/"
    return {file.path.removeprefix(prefix): file.size for file in found if file.type == FileType.File}


def parent_address(address: str) -> str:
    """The folder of a file elsewhere; options of the address stay."""
    path, mark, options = address.partition("?")
    return path.rpartition("/")[0] + mark + options


def copy_file(address: str, name: str, target: Path) -> None:
    """Copy a file of a folder elsewhere, under its name here only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(3)}")
    try:
        if os.getpid() == _first_process:
            _copy(address, name, part)
        else:
            _copy_in_a_new_process(address, name, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def copy_all(address: str, target: Path) -> Path:
    """Copy a file, or a folder with all that is in it; returns where it is now."""
    found = sizes(address)
    if not found:
        raise DataError(f"There is no input {address}", next_step="check the address and your rights")
    if list(found) == [""]:
        file = target / Path(unquote(urlsplit(address).path)).name
        copy_file(address, "", file)
        return file
    for name in found:
        if ".." in Path(name).parts:
            raise DataError("A file's name leads out of its folder", got=f"{address}: {name}")
        copy_file(address, name, target / name)
    return target


class FolderCache:
    """Copies of files of one folder elsewhere.

    May be pickled and used after a fork.

    Args:
        address: of the folder.
        version: names what is in it; another version has copies of its own.
        limit_gb: all copies here of all folders together take no more; a file that is in use may.
    """

    def __init__(self, address: str, *, version: str, limit_gb: float) -> None:
        key = hashlib.blake2b(f"{address}\0{version}".encode(), digest_size=10).hexdigest()
        self.address = address
        self.folder = cache_folder() / "data" / key
        self._limit = int(limit_gb * 2**30)

    def fetch(self, name: str, *, num_bytes: int | None = None) -> Path:
        """Where a copy of this file is; made now unless there is one of the right size."""
        target = self.folder / name
        if not _is_there(target, num_bytes):
            with _alone(target):
                if not _is_there(target, num_bytes):
                    copy_file(self.address, name, target)
                    self._make_room(target)
        with contextlib.suppress(OSError):
            os.utime(target)
        return target

    def _make_room(self, kept: Path) -> None:
        files = [(path.stat(), path) for path in (cache_folder() / "data").rglob("*") if path.is_file()]
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if total <= self._limit:
                return
            # Indexes of data sets stay: they are small, and mapped by whoever has one open.
            if path != kept and path.suffix in (".parquet", ".pq") and not _is_index(path.name):
                path.unlink(missing_ok=True)
                total -= stat.st_size


def open_elsewhere(address: str, *, limit_gb: float) -> FolderCache:
    """The copy of a data set elsewhere: its index now, its histories when they are read."""
    try:
        manifest = read_small(address, DATASET_FILE)
    except FileNotFoundError as error:
        raise DataError(
            f"{address} is not a FreeScale data set: it has no readable {DATASET_FILE}",
            next_step="run `freescale prepare INPUT OUT_DIR` on your interactions, and copy OUT_DIR there",
        ) from error
    cache = FolderCache(address, version=manifest.decode("utf-8", "replace"), limit_gb=limit_gb)
    found = sizes(address)
    # The manifest last: with it, a copy of a data set is complete.
    for name in [*filter(_is_index, found), DATASET_FILE]:
        if name in found:
            cache.fetch(name, num_bytes=found[name])
    return cache


def _is_index(name: str) -> bool:
    """Whether a file is small, and wanted as soon as a data set is opened."""
    return name in INDEX_FILES or fnmatch.fnmatchcase(name, words_file("*"))


def _is_there(path: Path, num_bytes: int | None) -> bool:
    try:
        return num_bytes in (None, path.stat().st_size)
    except OSError:
        return False


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process at a time copies a file; the others wait and find it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _resolve(address: str) -> tuple[Any, str]:
    """Pyarrow's file system, or fsspec's where pyarrow has none, and the path there."""
    import pyarrow as pa
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        return FileSystem.from_uri(address)
    except (pa.ArrowException, ValueError, OSError) as error:
        try:
            import fsspec

            system, path = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError, OSError) as other:
            raise DataError(
                "This address cannot be opened",
                got=f"{address}: {error}; {other}",
                allowed="s3://, gs://, abfs://, hdfs://, file://, and what an installed fsspec package adds",
            ) from error
        return PyFileSystem(FSSpecHandler(system)), path


def _join(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}" if name else base


def _copy(address: str, name: str, target: Path) -> None:
    system, base = _resolve(address)
    with _told(address), system.open_input_stream(_join(base, name)) as stream, target.open("wb") as file:
        while block := stream.read(_BLOCK):
            file.write(block)


def _copy_in_a_new_process(address: str, name: str, target: Path) -> None:
    command = [sys.executable, "-m", "freescale.data.stored.storage", address, name, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise DataError("A file could not be read from elsewhere", got=f"{_join(address, name)}: {why}")


@contextlib.contextmanager
def _told(address: str) -> Iterator[None]:
    """Errors of file systems, with the address; one that is not there stays what it is."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            "A file could not be read from elsewhere",
            got=f"{address}: {error}",
            next_step="check the address, the network and your rights",
        ) from error


if __name__ == "__main__":
    _copy(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
