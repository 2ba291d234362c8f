"""Export: weights as safetensors, item vectors as Parquet, a manifest; written whole, and read again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freescale import __version__, registry
from freescale.data import IntArray, ItemNames
from freescale.embedding import as_compute
from freescale.errors import CheckpointError, ConfigError, DataError
from freescale.model import (
    Recommender,
    export_facts,
    make_encoder,
    make_head,
    retrieves,
    scores_candidates,
)
from freescale.train.item_vectors import ItemEncoder
from freescale.train.state.exported_model import ExportedModel

_FORMAT = "freescale-export"
_VERSION = 2  # 1 knew one head and kept its "normalize" alone
_CHUNK_ITEMS = 65_536


def write_export(
    out: Path,
    *,
    model: Recommender,
    items: ItemEncoder,
    catalog: IntArray,
    encoder: Mapping[str, Any],
    facts: Mapping[str, Any],
    names: ItemNames | None = None,
) -> Path:
    """Write model.safetensors, items.parquet and manifest.json into a new folder, all or nothing.

    `names` are the user's own ids of the items of the catalogue; numbers unless given.
    """
    from safetensors.torch import save_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            "the export folder is not empty or no folder", got=out, next_step="choose another folder"
        )
    if model.tokens is not None:
        raise DataError(
            "a model that reads features of events or users cannot be exported yet",
            got="histories that it is asked with hold items and times alone",
            allowed="features of items: they are part of the vectors that are exported",
            next_step="train with features of items alone in the section features; `freescale evaluate` takes all",
        )
    head = export_facts(model.head)
    staged = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    staged.mkdir(parents=True)
    try:
        weights = model.without_items().state_dict()
        dense = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        save_file(dense, staged / "model.safetensors")
        names = names or ItemNames(catalog)
        _write_items(staged / "items.parquet", items, catalog, names)
        fingerprint = _fingerprint(staged / "model.safetensors", staged / "items.parquet")
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "freescale": __version__,
            "encoder": dict(encoder),
            "head": head,
            "num_items": len(catalog),
            "item_ids": names.kind,
            "fingerprint": fingerprint,
            **facts,
        }
        (staged / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if out.exists():
            out.rmdir()
        os.replace(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return out


def _fingerprint(*paths: Path) -> str:
    """Names the weights: token caches carry it, so that those of other weights are refused."""
    digest = hashlib.blake2b(digest_size=12)
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _write_items(path: Path, items: ItemEncoder, catalog: IntArray, names: ItemNames) -> None:
    """One row an item: its raw id and its vector, in chunks; whatever encoded it, serving needs the vector alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None
    try:
        for numbers, vectors in items.catalogue(catalog, chunk=_CHUNK_ITEMS).parts():
            dim = vectors.shape[1]
            index = numbers.cpu().numpy()
            flat = pa.array(vectors.float().cpu().numpy().ravel())
            columns = {"item": catalog[index], "vector": pa.FixedSizeListArray.from_arrays(flat, dim)}
            if names.words is not None:
                columns["word"] = names.words.take(pa.array(index))
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def load_export(path: str | Path, *, plugins: Sequence[str] = ()) -> ExportedModel:
    """Read an exported folder; runs no code from it.

    Args:
        path: the folder.
        plugins: modules that register the encoder or the head, where the model has one from outside; they are imported.
    """
    for module in plugins:
        registry.load_plugin(module)
    try:
        return _read_export(Path(path))
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        again = "`freescale export RUN_DIR OUT_DIR`"
        named = isinstance(error, ConfigError)
        raise CheckpointError(
            "this is not a readable FreeScale export",
            got=f"{path}: {why}",
            allowed=error.allowed if isinstance(error, ConfigError) else None,
            next_step=f"load_export(path, plugins=[MODULE]) with what registers it, or {again}"
            if named
            else again,
        ) from error


def _read_export(folder: Path) -> ExportedModel:
    import pyarrow.parquet as pq
    from safetensors.torch import load_file

    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != _FORMAT or manifest["version"] not in (1, _VERSION):
        raise ValueError("not an export of this version")
    dense = load_file(folder / "model.safetensors")
    table = pq.read_table(folder / "items.parquet")
    model = _make_model(manifest)
    dtype = next((value.dtype for value in dense.values() if value.is_floating_point()), torch.float32)
    model = model.to(dtype).eval()
    model.load_state_dict(dense)
    flat = table.column("vector").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    words = (
        table.column("word").cast("large_string").combine_chunks() if "word" in table.column_names else None
    )
    items = table.column("item").to_numpy()
    names = ItemNames(items, manifest.get("item_ids", "int64"), words)
    vectors = torch.from_numpy(flat.reshape(len(items), -1).copy()).to(dtype)
    return ExportedModel(
        model=model, items=items, vectors=as_compute(vectors), manifest=manifest, names=names
    )


def _make_model(manifest: Mapping[str, Any]) -> Recommender:
    """The model a manifest describes, its weights not filled in yet."""
    facts = manifest["head"] if manifest["version"] > 1 else _first_head(manifest)
    head = make_head(facts["name"], dim=manifest["encoder"]["dim"], options=facts["options"])
    if not (retrieves(head) or scores_candidates(head)):
        raise ValueError(f"head {facts['name']!r} has no queries and candidates")
    return Recommender(encoder=make_encoder(**manifest["encoder"], dropout=0.0), head=head)


def _first_head(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The head of an export of version 1."""
    return {"name": "retrieval", "options": {"normalize": manifest["normalize"]}}
