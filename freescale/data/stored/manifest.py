"""What a data set folder holds: names of files and the manifest, shared by its writer and its reader."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from freescale.errors import DataError

DATASET_FILE = "dataset.json"
LOG_FILE = "log.json"
"""Of a log, beside the folders of its windows, each of which is a data set."""
LENGTHS_FILE = "lengths.npy"
ITEMS_FILE = "items.parquet"
WORD_FILES = {"user": "words-user.parquet", "item": "words-item.parquet"}
"""Words of ids that are text: id (ascending), word."""
_REFUSED = {
    errno.EMFILE: "this process may not open more files: raise the limit (`ulimit -n`)",
    errno.ENFILE: "this machine may not open more files: end other programs, or raise the limit (fs.file-max)",
    errno.EACCES: "let this user read it (`chmod`, `chown`)",
}
DATASET_FORMAT = "freescale-dataset"
DATASET_VERSION = 2
"""Of a data set with a schema; one without is as it always was, and says 1."""
WITHOUT_SCHEMA = 1
CROSS_HASH = "mix64"
"""How ids are crossed; see cross_hash.py."""
TIME_UNIT = "s"
"""Times are whole seconds since 1970 in UTC; the manifest of a data set that has times says so."""
SHARD_DIGEST = "freescale.digest"
"""Where a shard says what it holds; dataset.json says the same."""
FEATURE_DTYPES: dict[str, np.dtype[Any]] = {
    "item": np.dtype(np.int64),
    "time": np.dtype(np.int64),
    "action": np.dtype(np.float32),
}

_PREPARE_AGAIN = "run `freescale prepare INPUT OUT_DIR` again, or copy the data set again"
LOG_AGAIN = "windows of a log never change: put the file back as it was, or make the log anew"
_FIELDS = (("name", str), ("num_users", int), ("features", list), ("shards", list))


def is_dataset(path: str | Path) -> bool:
    """Whether this folder holds a data set written by `freescale prepare`, of whatever version."""
    try:
        return _says_dataset(_load(Path(path) / DATASET_FILE))
    except (OSError, ValueError):
        return False


def was_dataset(path: Path) -> bool:
    """Whether a folder without a readable manifest holds what only `freescale prepare` writes."""
    return path.is_dir() and (path / LENGTHS_FILE).exists()


def save_manifest(folder: Path, fields: dict[str, Any]) -> None:
    """Write the manifest, which makes a data set of the files that are there."""
    manifest = {"format": DATASET_FORMAT, "version": WITHOUT_SCHEMA, **fields}
    (folder / DATASET_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data set of this version, what the reader needs of it checked."""
    file = folder / DATASET_FILE
    try:
        manifest = _load(file)
    except OSError as error:
        if _is_window(folder):
            raise damaged(file, str(error)) from error
        raise DataError(
            f"{folder} is not a FreeScale data set: it has no readable {DATASET_FILE}",
            got=error.strerror,
            next_step=f"run `freescale prepare INPUT {folder}` on your interactions first",
        ) from error
    except ValueError as error:
        raise damaged(file, str(error)) from error
    if not _says_dataset(manifest):
        raise damaged(file, f"it does not say that it is a {DATASET_FORMAT}")
    if manifest.get("version") not in (WITHOUT_SCHEMA, DATASET_VERSION):
        raise DataError(
            f"The data set {folder} was written by another version of FreeScale",
            got=f"version {manifest.get('version')}",
            allowed=f"version {WITHOUT_SCHEMA} or {DATASET_VERSION}",
            next_step="run `freescale prepare` again with this version",
        )
    for key, kind in _FIELDS:
        if not isinstance(manifest.get(key), kind):
            raise damaged(file, f"{key!r} is {manifest.get(key)!r}")
    known = all(name in list(FEATURE_DTYPES) for name in manifest["features"])
    if not known or "item" not in manifest["features"]:
        raise damaged(file, f"'features' is {manifest['features']!r}")
    if manifest["version"] == DATASET_VERSION and not isinstance(manifest.get("schema"), dict):
        raise damaged(file, f"'schema' is {manifest.get('schema')!r}")
    if manifest.get("cross_hash", CROSS_HASH) != CROSS_HASH:
        raise damaged(file, f"'cross_hash' is {manifest['cross_hash']!r}, which this version does not know")
    if "time" in manifest["features"] and _unit_of_times(manifest) != TIME_UNIT:
        raise _other_times(folder, manifest.get("time_unit"))
    return manifest


def _unit_of_times(manifest: dict[str, Any]) -> object:
    """Of a data set that does not say: text had its numbers taken as they were, in nearly all data seconds."""
    text = manifest.get("source_format") not in (None, "parquet")
    return manifest.get("time_unit", TIME_UNIT if text else None)


def _other_times(folder: Path, unit: object) -> DataError:
    """Earlier versions kept the unit of the input: microseconds from Parquet beside seconds from text."""
    return DataError(
        f"The data set {folder} does not say that its times are seconds",
        got=f"'time_unit' is {unit!r}",
        allowed=f"{TIME_UNIT!r}: whole seconds since 1970 in UTC",
        next_step="run `freescale prepare` again: earlier versions kept whatever unit the input had",
    )


def id_kinds_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """What users and items are to those who made the data; data sets were of int64 ids before they said so."""
    return {role: manifest.get("ids", {}).get(role, "int64") for role in WORD_FILES}


def words_file(table: str) -> str:
    """Where the words of the ids of a table stand."""
    return f"words-{table}.parquet"


def damaged(path: Path, why: str) -> DataError:
    """The error of a data set file that cannot be trusted; or of a sound one that the system keeps from us."""
    for number, cure in _REFUSED.items():
        if os.strerror(number) in why:
            return DataError(f"The data set file {path} cannot be opened", got=why, next_step=cure)
    again = LOG_AGAIN if _is_window(path.parent) else _PREPARE_AGAIN
    return DataError(f"The data set file {path} is missing or damaged", got=why, next_step=again)


def _is_window(folder: Path) -> bool:
    return (folder.parent / LOG_FILE).exists()


def _load(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _says_dataset(manifest: Any) -> bool:
    return isinstance(manifest, dict) and manifest.get("format") == DATASET_FORMAT
