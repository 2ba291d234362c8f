"""The data set a recipe names: embedded, prepared, raw and prepared on the way, or of a kind from outside.

A kind of source is a function that is called as

    make(path: str, options, *, seed: int) -> SequenceSource

with `data.path`, an instance of the options it was registered with (None where it has none), and `run.seed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.data.log.log_file import is_log
from freescale.data.preparing.prepared_once import OnChange, prepared_once
from freescale.data.source import SequenceSource, check_source
from freescale.data.stored.manifest import DATASET_FILE, is_dataset
from freescale.data.stored.storage import is_address, local_path, sizes
from freescale.errors import DataError
from freescale.registry import Kind, find

AUTO, SYNTHETIC, PARQUET, LOG = "auto", "synthetic", "parquet", "log"


def source_kind(path: str | Path, name: str = AUTO) -> Kind:
    """The kind of source; "auto" makes data up where the path says "synthetic" and reads a log or Parquet else."""
    if name == AUTO:
        name = SYNTHETIC if str(path) == SYNTHETIC else PARQUET
        if name == PARQUET and not is_address(path) and is_log(local_path(path)):
            name = LOG
    return find("source", name, key="data.source")


def open_source(
    path: str | Path,
    *,
    kind: str = AUTO,
    options: Any = None,
    seed: int = 0,
    cache: Path | None = None,
    schema: Mapping[str, Any] | None = None,
    on_change: OnChange = "refuse",
) -> SequenceSource:
    """The data set, checked so that it can be trained on.

    Args:
        path: "synthetic", a prepared folder, a raw file, or whatever a kind from outside reads.
        kind: "auto", "synthetic", "parquet" or the name of a kind from outside.
        options: what the kind was registered to take; None for its defaults.
        seed: makes another data set where it is made up.
        cache: where a raw file is prepared, once; None refuses raw files.
        schema: features to keep of a raw file.
        on_change: what to do where another file, or other features, were prepared there.
    """
    found = source_kind(path, kind)
    if options is None and found.options is not None:
        options = found.options()
    if found.ships and found.name == PARQUET:
        path = _prepared(path, cache, schema, on_change)
    source: SequenceSource = found.make(str(path), options, seed=seed)
    if not found.ships:
        _check_complete(found.name, source)
    if not (found.ships and found.name == LOG):  # a sealer leaves out what is too short
        check_source(source)
    return source


def _prepared(
    path: str | Path, cache: Path | None, schema: Mapping[str, Any] | None, on_change: OnChange
) -> str | Path:
    """The folder to read: this one, or where this raw file is prepared, now or by an earlier run."""
    if is_address(path):
        if cache is None or DATASET_FILE in sizes(str(path)):
            return path
        return prepared_once(path, cache, schema=schema, on_change=on_change)
    path = local_path(path)
    if not path.exists() and not (on_change == "keep" and cache is not None and is_dataset(cache)):
        raise DataError(
            "data.path does not exist",
            got=path,
            next_step="`freescale prepare INPUT OUT_DIR` makes a data set",
        )
    if is_dataset(path):
        return path
    if cache is None:
        raise DataError(
            "data.path is not a prepared folder",
            got=path,
            next_step="`freescale prepare INPUT OUT_DIR` makes one",
        )
    return prepared_once(path, cache, schema=schema, on_change=on_change)


def _check_complete(name: str, source: SequenceSource) -> None:
    """A source from outside must have all that a source has, and agree with itself."""
    needed = ("name", "features", "lengths", "groups", "items", "read")
    missing = [member for member in needed if not hasattr(source, member)]
    if missing:
        raise DataError(
            f"source {name!r} is not complete",
            got=f"without {', '.join(missing)}",
            allowed=", ".join(needed),
            next_step="see `SequenceSource` in freescale/data/source.py",
        )
    if source.lengths.ndim != 1 or source.lengths.dtype.kind != "i" or "item" not in source.features:
        raise DataError(
            f"source {name!r} cannot be read by row",
            got=f"lengths of {source.lengths.dtype} and shape {source.lengths.shape}, features {source.features}",
            allowed="int64 lengths, one a history, and the feature 'item'",
        )
    if int(source.groups.sum()) != len(source.lengths):
        raise DataError(
            f"the groups of source {name!r} do not add up to its rows",
            got=int(source.groups.sum()),
            allowed=len(source.lengths),
        )
