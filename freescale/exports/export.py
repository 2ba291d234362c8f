"""Export: weights as safetensors, item vectors as Parquet, a manifest; written whole, and read again."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale import registry
from freescale.data import IntArray, ItemNames
from freescale.embedding import EmbeddingTable, IdMap, as_compute
from freescale.errors import CheckpointError, ConfigError, DataError
from freescale.exports.asked_scores import check_pools
from freescale.exports.exported_model import ExportedModel
from freescale.exports.served_features import ExportFeatures, ServedFeatures, make_tokens, table_file
from freescale.exports.served_tables import ServedTable, SharedRows, shared_rows, write_table
from freescale.exports.version import SHARED_TABLE, SHARING, Version
from freescale.model import (
    Recommender,
    export_facts,
    make_encoder,
    make_head,
    retrieves,
    scores_candidates,
)
from freescale.train import ItemEncoder
from freescale.version import __version__

if TYPE_CHECKING:
    from freescale.exports.chain_model import ChainModel

_FORMAT = "freescale-export"
_VERSION = 2  # 1 knew one head and kept its "normalize" alone
_FEATURES = 3  # as 2, and requests say more than items and times
_SHARED = 4  # as 2, and items without a row of their own share some
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
    from safetensors.torch import save_file

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
        dense = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        shared = None if rest is None else shared_rows(rest.id_map)
        if rest is not None and shared is not None and rest.items is not None:
            without = np.setdiff1d(rest.items, catalog, assume_unique=True)
            dense[SHARING] = torch.from_numpy(np.sort(without))
        save_file(dense, staged / "model.safetensors")
        names = names or ItemNames(catalog)
        more = {} if features is None else features.item_columns()
        _write_items(staged / "items.parquet", items, catalog, names, more)
        asked, files = (None, []) if features is None else features.write(staged)
        if rest is not None and shared is not None:
            files.append(staged / table_file(SHARED_TABLE))
            write_table(files[-1], rest.table, shared, None)
        fingerprint = _fingerprint(staged / "model.safetensors", staged / "items.parquet", *files)
        manifest = {
            "format": _FORMAT,
            "version": _FEATURES if asked is not None else _VERSION if shared is None else _SHARED,
            "freescale": __version__,
            "encoder": dict(encoder),
            "head": kept_head,
            "num_items": len(catalog),
            "item_ids": names.kind,
            "fingerprint": fingerprint,
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
            columns |= {name: values[index] for name, values in more.items()}
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def load_export(
    path: str | Path,
    *,
    plugins: Sequence[str] = (),
    encoder: torch.nn.Module | None = None,
    head: torch.nn.Module | None = None,
) -> ExportedModel | ChainModel:
    """Read an exported folder, or the last version of a chain of them; runs no code from it.

    Args:
        path: the folder.
        plugins: modules that register the encoder or the head, where the model has one from outside; they are imported.
        encoder: one as the `Trainer` was given, where it was an object; it is filled with the exported weights.
        head: the same.
    """
    for module in plugins:
        registry.load_plugin(module)
    from freescale.exports.chain import is_chain

    if is_chain(path):
        from freescale.exports.chain_model import ChainModel

        if encoder is not None or head is not None:
            raise CheckpointError(
                "a chain is served by kinds that have names",
                got="objects as encoder or head",
                next_step="register them (`--plugin`, plugins=[MODULE])",
            )
        return ChainModel(path)
    try:
        return _read_export(Path(path), encoder, head)
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        again = "`freescale export RUN_DIR OUT_DIR`"
        raise CheckpointError(
            "this is not a readable FreeScale export",
            got=f"{path}: {why}",
            allowed=error.allowed if isinstance(error, ConfigError) else None,
            next_step=_with_code(error, again) if isinstance(error, ConfigError) else again,
        ) from error


def _with_code(error: ConfigError, again: str) -> str:
    """What to do about an export whose code is not here."""
    if error.next_step is not None and "load_export(path" in error.next_step:
        return error.next_step
    return f"load_export(path, plugins=[MODULE]) with what registers it, or {again}"


def _read_export(
    folder: Path, encoder: torch.nn.Module | None, head: torch.nn.Module | None
) -> ExportedModel:
    import pyarrow.parquet as pq
    from safetensors.torch import load_file

    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != _FORMAT or manifest["version"] not in _versions(manifest):
        raise ValueError("not an export of this version")
    dense = load_file(folder / "model.safetensors")
    table = pq.read_table(folder / "items.parquet")
    model = _make_model(manifest, encoder, head)
    sharing = dense.pop(SHARING, None)
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
    features = None
    if "features" in manifest:
        features = ServedFeatures.read(folder, manifest["features"], table, dtype)
    shared = None
    if "shared" in manifest:
        rest = ServedTable.read(folder / table_file(SHARED_TABLE), manifest["shared"], dtype)
        shared = SharedRows(rest, sharing)
    return ExportedModel(
        model=model,
        items=items,
        vectors=_with_shared(as_compute(vectors), shared),
        shared=shared,
        manifest=manifest,
        names=names,
        features=features,
    )


def exported_version(version: Version) -> ExportedModel:
    """A version of a chain, ready to answer."""
    manifest = {**version.manifest, "fingerprint": version.fingerprint}
    model = _make_model(manifest, None, None)
    dtype = next(
        (value.dtype for value in version.dense.values() if value.is_floating_point()), torch.float32
    )
    model = model.to(dtype).eval()
    dense = dict(version.dense)
    sharing = dense.pop(SHARING, None)
    model.load_state_dict(dense)
    features = None
    if "features" in manifest:
        facts = manifest["features"]
        tables = {
            name: ServedTable(
                torch.from_numpy(rows.vectors).to(dtype),
                None if rows.ids is None else torch.from_numpy(rows.ids),
                facts["tables"][name],
            )
            for name, rows in version.tables.items()
        }
        features = ServedFeatures.made(facts, version.ids, tables)
    shared = None
    if "shared" in manifest:
        rows = torch.from_numpy(version.tables[SHARED_TABLE].vectors).to(dtype)
        rest = ServedTable(rows, torch.empty(0, dtype=torch.int64), manifest["shared"])
        shared = SharedRows(rest, sharing)
    return ExportedModel(
        model=model,
        items=version.ids,
        vectors=_with_shared(as_compute(torch.from_numpy(version.vectors).to(dtype)), shared),
        shared=shared,
        manifest=manifest,
        names=ItemNames(version.ids, manifest.get("item_ids", "int64"), version.words),
        features=features,
    )


def _with_shared(vectors: Tensor, shared: SharedRows | None) -> Tensor:
    """Vectors of items, and behind them those that others share."""
    return vectors if shared is None else torch.cat([vectors, as_compute(shared.table.vectors)])


def _versions(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Versions of the format that a manifest can be of."""
    if "shared" in manifest:
        return (_SHARED,)
    return (_FEATURES,) if "features" in manifest else (1, _VERSION)


def _make_model(
    manifest: Mapping[str, Any], encoder: torch.nn.Module | None, head: torch.nn.Module | None
) -> Recommender:
    """The model a manifest describes, its weights not filled in yet; with objects of a program where it had such."""
    facts = manifest["head"] if manifest["version"] > 1 else _first_head(manifest)
    shape = manifest["encoder"]
    given = {"encoder": (encoder, shape["kind"]), "head": (head, facts["name"])}
    makers = {family: _giver(part) for family, (part, _) in given.items() if part is not None}
    for family in makers:
        _check_class(given[family][0], family, given[family][1])
    with registry.offered(makers, named={family: given[family][1] for family in makers}):
        made = make_head(facts["name"], dim=shape["dim"], options=facts["options"])
        if not (retrieves(made) or scores_candidates(made)):
            raise ValueError(f"head {facts['name']!r} has no queries and candidates")
        tokens = make_tokens(manifest)
        return Recommender(encoder=make_encoder(**shape, dropout=0.0), head=made, tokens=tokens)


def _giver(part: torch.nn.Module) -> Callable[..., torch.nn.Module]:
    return lambda *_: part


def _check_class(part: object, family: str, kind: str) -> None:
    """An object takes the place of another object of its class, and of nothing else."""
    wanted = kind.removeprefix(registry.PYTHON) if kind.startswith(registry.PYTHON) else None
    if type(part).__qualname__ != wanted:
        raise ConfigError(
            f"the {family} of this export is {'of class ' + wanted if wanted else f'the kind {kind!r}'}, "
            f"got a {type(part).__qualname__}",
            next_step=f"load_export(path, {family}={wanted}(...))"
            if wanted
            else "load_export(path) makes it",
        )


def _first_head(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The head of an export of version 1."""
    return {"name": "retrieval", "options": {"normalize": manifest["normalize"]}}
