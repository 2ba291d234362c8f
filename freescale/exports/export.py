"""Export: weights as safetensors, item vectors as Parquet, a manifest; written whole."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from freescale.data import IntArray, ItemNames, write_tensors
from freescale.embedding import EmbeddingTable, IdMap
from freescale.errors import CheckpointError, DataError
from freescale.exports.chains.version import SHARED_TABLE, SHARING
from freescale.exports.files.damage import refusals_named
from freescale.exports.files.file_sums import FILES, sums_of
from freescale.exports.files.parquet_parts import write_parts
from freescale.exports.requests.asked_scores import check_pools
from freescale.exports.served.served_features import ExportFeatures, table_file
from freescale.exports.served.served_tables import shared_rows, write_table
from freescale.model import (
    Recommender,
    export_facts,
)
from freescale.train import ItemEncoder
from freescale.version import __version__

FORMAT = "freescale-export"
_VERSION = 2  # 1 knew one head and kept its "normalize" alone
_FEATURES = 3  # as 2, and requests say more than items and times
_SHARED = 4  # as 2, and items without a row of their own share some
_READABLE = (1, _VERSION, _FEATURES, _SHARED)
_CHUNK_ITEMS = 65_536


class RestOfItems(NamedTuple):
    """Items without a vector of their own, which share rows of the table of items.

    Args:
        table: of items.
        id_map: its map; of one that has no shared rows nothing is kept.
        items: all that evaluation reads from the table, ascending; None: any id.
    """

    table: EmbeddingTable
    id_map: IdMap
    items: IntArray | None


def write_export(
    out: Path,
    *,
    model: Recommender,
    items: ItemEncoder,
    catalog: IntArray,
    encoder: Mapping[str, Any],
    facts: Mapping[str, Any],
    head: Mapping[str, Any] | None = None,
    names: ItemNames | None = None,
    features: ExportFeatures | None = None,
    rest: RestOfItems | None = None,
) -> Path:
    """Write model.safetensors, items.parquet and manifest.json into a new folder, all or nothing.

    A program that is run again exports again: where the folder holds this very export already, nothing is changed.

    `head` is the kind of the head and its options in the recipe, for one that does not say itself what makes it again.
    `names` are the user's own ids of the items of the catalogue; numbers unless given. `features` are those of events
    and users, which come with requests; then there is a file for each of their tables, too. `rest` says
    which items without a vector of their own may stand in a history all the same, and where theirs are.
    """
    full = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if full and not (out / "manifest.json").is_file():
        raise _occupied(out)
    if model.tokens is not None and features is None:
        raise DataError(
            "this model reads features of events or users, and an export keeps how",
            next_step="write_export(..., features=...), as `freescale export` does",
        )
    kept_head = export_facts(model.head, **(head or {}))
    check_pools(kept_head, () if features is None else features.asked())
    staged = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    staged.mkdir(parents=True)
    try:
        weights = model.without_items().state_dict()
        dense = {name: value.detach().cpu() for name, value in weights.items()}
        shared = None if rest is None else shared_rows(rest.id_map)
        if rest is not None and shared is not None and rest.items is not None:
            without = np.setdiff1d(rest.items, catalog, assume_unique=True)
            dense[SHARING] = torch.from_numpy(np.sort(without))
        with refusals_named(staged):
            write_tensors(staged / "model.safetensors", dense)
            names = names or ItemNames(catalog)
            more = {} if features is None else features.item_columns()
            _write_items(staged / "items.parquet", items, catalog, names, more)
            asked, files = (None, []) if features is None else features.write(staged)
            if rest is not None and shared is not None:
                files.append(staged / table_file(SHARED_TABLE))
                write_table(files[-1], rest.table, shared, None)
            files = [staged / "model.safetensors", staged / "items.parquet", *files]
            manifest = {
                "format": FORMAT,
                "version": _FEATURES if asked is not None else _VERSION if shared is None else _SHARED,
                "freescale": __version__,
                "encoder": dict(encoder),
                "head": kept_head,
                "num_items": len(catalog),
                "item_ids": names.kind,
                "fingerprint": _fingerprint(*files),
                FILES: sums_of(files),
                **({} if asked is None else {"features": asked}),
                **({} if shared is None else {"shared": dict(shared.facts)}),
                **facts,
            }
            (staged / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if full:
            if not _same_files(staged, out):
                raise _occupied(out)
            return out
        if out.exists():
            out.rmdir()
        os.replace(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return out


def _occupied(out: Path) -> DataError:
    return DataError(
        "the export folder is not empty, or no folder, and holds something else than this export",
        got=out,
        next_step="choose another folder, or remove this one",
    )


def _same_files(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*"))
    if names != sorted(path.relative_to(other) for path in other.rglob("*")):
        return False
    files = [name for name in names if (one / name).is_file()]
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in files)


def _fingerprint(*paths: Path) -> str:
    """Names the weights: token caches carry it, so that those of other weights are refused."""
    digest = hashlib.blake2b(digest_size=12)
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _write_items(
    path: Path, items: ItemEncoder, catalog: IntArray, names: ItemNames, more: Mapping[str, Any]
) -> None:
    """One row an item: its raw id and its vector, in chunks; whatever encoded it, serving needs the vector alone."""
    import pyarrow as pa

    def parts() -> Iterator[Any]:
        for numbers, vectors in items.catalogue(catalog, chunk=_CHUNK_ITEMS).parts():
            dim = vectors.shape[1]
            index = numbers.cpu().numpy()
            flat = pa.array(vectors.float().cpu().numpy().ravel())
            columns = {"item": catalog[index], "vector": pa.FixedSizeListArray.from_arrays(flat, dim)}
            if names.words is not None:
                columns["word"] = names.words.take(pa.array(index))
            columns |= {name: values[index] for name, values in more.items()}
            yield pa.table(columns)

    write_parts(path, parts())


def check_version(manifest: Mapping[str, Any], where: object) -> None:
    """Refuse what is no export, and exports of versions that nobody here reads.

    Raises:
        CheckpointError: it was written by another version of FreeScale.
        ValueError: it is no export, or its manifest contradicts itself.
    """
    if manifest["format"] != FORMAT:
        raise ValueError(f"its manifest is of the format {manifest['format']!r}, not {FORMAT!r}")
    version = manifest["version"]
    if version not in _READABLE:
        raise CheckpointError(
            "this is not a readable FreeScale export: another version of FreeScale wrote it",
            got=f"{where}: version {version}, of freescale {manifest.get('freescale')}",
            allowed=f"version {', '.join(map(str, _READABLE[:-1]))} or {_READABLE[-1]} (freescale {__version__})",
            next_step="read it with the version that wrote it, or export again with this one: "
            "`freescale export RUN_DIR OUT_DIR`",
        )
    if version not in _versions_of(manifest):
        raise ValueError(f"its manifest is of version {version} and does not hold what that holds")


def _versions_of(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Versions of the format that a manifest can be of."""
    if "shared" in manifest:
        return (_SHARED,)
    return (_FEATURES,) if "features" in manifest else (1, _VERSION)
