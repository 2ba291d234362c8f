"""Raw input that training prepares on its way: once for a run folder, and what it was prepared from is kept beside.

    RUN_DIR/data/dataset.json ...    the data set
    RUN_DIR/data/input.json          files of the input, with size, time of change and a digest of each; the schema

A run folder outlives its input: the file is written anew, or the next run names another one. So the input is looked
at each time. A file of the same size that was changed, or copied, is read again; of Parquet its footer, which says
where every page lies and how large it is, is enough. Of input elsewhere (s3://...) names and sizes are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.reading.input_files import all_files
from freescale.data.stored.digest import digest_footer
from freescale.data.stored.durable import write_durably
from freescale.data.stored.manifest import DATASET_FILE, is_dataset
from freescale.data.stored.storage import is_address, sizes
from freescale.errors import DataError

INPUT_FILE = "input.json"
_BLOCK = 1 << 20

OnChange = Literal["refuse", "renew", "keep"]
"""Where the input is another one than the data set was prepared from: end with an error, prepare it anew, or read what
is there, because the data as they were are asked for, or the first rank has looked already."""


def prepared_once(
    source: str | Path, cache: Path, *, schema: Mapping[str, Any] | None, on_change: OnChange
) -> Path:
    """The folder where this input is prepared, now or by an earlier run."""
    there = is_dataset(cache)
    if there and on_change == "keep":
        return cache
    then = _read(cache / INPUT_FILE) if there else None
    if there and (then is not None or on_change == "refuse"):
        # Folders of earlier versions do not say it.
        changes = [] if then is None else _changes(then, source, schema)
        if then is not None and on_change == "refuse" and changes:
            raise DataError(
                f"{cache} was prepared from {then['path']}, and data.path is other input:\n  - "
                + "\n  - ".join(changes),
                next_step="--new-data goes on with it, --resume never starts over with it, and another run.out leaves "
                "this run as it is",
            )
        if not changes:
            return cache
    # Before it is read: what changes meanwhile is another input then.
    said = {
        "path": str(source),
        "files": _looks(source),
        "digests": _digests(source),
        "schema": _digest_schema(schema),
    }
    try:
        prepare(source, cache, schema=schema, overwrite=there)
    except DataError as error:
        if "`--" not in (error.next_step or ""):
            raise
        raise DataError(
            error.what,
            got=error.got,
            allowed=error.allowed,
            next_step=f"{error.next_step}; options are those of `freescale prepare {source} OUT_DIR`: prepare it by "
            "that, and set data.path=OUT_DIR",
        ) from error
    write_durably(cache / INPUT_FILE, json.dumps(said, indent=1) + "\n")
    return cache


def when_prepared(cache: Path) -> int | None:
    """A moment, in ns, that is another one where a data set was prepared anew; None where there is none."""
    return (cache / DATASET_FILE).stat().st_mtime_ns if is_dataset(cache) else None


def _changes(then: Mapping[str, Any], source: str | Path, schema: Mapping[str, Any] | None) -> list[str]:
    """How the input differs from what was prepared, in words."""
    before, now, digests = then["files"], _looks(source), then["digests"]
    files = _files(source)
    changes = [f"{name or source}: gone" for name in before if name not in now]
    changes += [f"{name or source}: new" for name in now if name not in before]
    for name in now:
        if name not in before or now[name] == before[name]:
            continue
        (size, _), (size_then, _) = now[name], before[name]
        if size != size_then:
            changes.append(f"{name or source}: {size_then:,} bytes then, {size:,} now")
        elif name in files and _digest(files[name]) != digests.get(name):
            changes.append(f"{name or source}: other contents")
    if _digest_schema(schema) != then["schema"]:
        changes.append("the section `features` of the recipe: another one")
    return changes


def _looks(source: str | Path) -> dict[str, list[int]]:
    """Size and time of change of every file, by its path below the input; "" for the input itself."""
    if is_address(source):
        return {name: [size, 0] for name, size in sizes(str(source)).items()}
    stats = {name: path.stat() for name, path in _files(source).items()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _files(source: str | Path) -> dict[str, Path]:
    """Files of this machine; none of what lies elsewhere."""
    if is_address(source):
        return {}
    path = Path(source)
    return {str(each.relative_to(path)): each for each in all_files(path)} if path.is_dir() else {"": path}


def _digests(source: str | Path) -> dict[str, str]:
    return {name: _digest(path) for name, path in _files(source).items()}


def _digest(path: Path) -> str:
    if path.suffix == ".parquet":
        return f"footer:{digest_footer(path)}"
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _digest_schema(schema: Mapping[str, Any] | None) -> str:
    said = json.dumps(schema, sort_keys=True, default=str)
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return said if {"path", "files", "digests", "schema"} <= said.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
