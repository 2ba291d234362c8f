"""An exported folder, or a version of a chain, as a model that answers; runs no code from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale import registry
from freescale.data import ItemNames, read_tensors
from freescale.embedding import as_compute
from freescale.errors import CheckpointError, ConfigError
from freescale.exports.chains.version import SHARED_TABLE, SHARING, Version
from freescale.exports.export import check_version
from freescale.exports.exported_model import ExportedModel
from freescale.exports.files.damage import damage_told, no_damage
from freescale.exports.files.file_sums import check_files
from freescale.exports.served.served_features import ServedFeatures, make_tokens, table_file
from freescale.exports.served.served_tables import ServedTable, SharedRows
from freescale.model import Recommender, make_encoder, make_head, retrieves, scores_candidates


def read_export(folder: Path, encoder: torch.nn.Module | None, head: torch.nn.Module | None) -> ExportedModel:
    """What `write_export` has written; `encoder` and `head` where a program's own objects take the place of kinds."""
    import pyarrow.parquet as pq

    manifest = json.loads((folder / "manifest.json").read_text())
    check_version(manifest, folder)
    check_files(folder, manifest)
    dense = read_tensors(folder / "model.safetensors")
    table = pq.read_table(folder / "items.parquet")
    model = _make_model(manifest, encoder, head)
    sharing = dense.pop(SHARING, None)
    dtype = next((value.dtype for value in dense.values() if value.is_floating_point()), torch.float32)
    model = model.to(dtype).eval()
    _load_weights(model, dense)
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
    dtype = next(
        (value.dtype for value in version.dense.values() if value.is_floating_point()), torch.float32
    )
    dense = dict(version.dense)
    sharing = dense.pop(SHARING, None)
    with damage_told(_not_served):
        check_version(manifest, "the chain")
        model = _make_model(manifest, None, None).to(dtype).eval()
        _load_weights(model, dense)
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


def _not_served(why: str) -> CheckpointError:
    return CheckpointError(
        "this version of a chain cannot be served",
        got=why,
        next_step="publish into a new folder with this version of FreeScale",
    )


def _load_weights(model: Recommender, dense: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(dense)
    except RuntimeError as error:
        causes = [line.strip() for line in str(error).splitlines()[1:]]
        why = causes[0] if causes else str(error)
        raise ValueError(
            f"its weights are not those of the model that its manifest describes: {why}"
        ) from error


def _with_shared(vectors: Tensor, shared: SharedRows | None) -> Tensor:
    """Vectors of items, and behind them those that others share."""
    return vectors if shared is None else torch.cat([vectors, as_compute(shared.table.vectors)])


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
        with _made_by("head", facts["name"]):
            made = make_head(facts["name"], dim=shape["dim"], options=facts["options"])
        if not (retrieves(made) or scores_candidates(made)):
            raise ValueError(f"head {facts['name']!r} has no queries and candidates")
        tokens = make_tokens(manifest)
        with _made_by("encoder", shape["kind"]):
            layers = make_encoder(**shape, dropout=0.0)
        return Recommender(encoder=layers, head=made, tokens=tokens)


def _made_by(family: str, kind: str) -> AbstractContextManager[None]:
    """Kinds that ship fail only at what a manifest says; what others fail at is a mistake in their code."""
    return nullcontext() if registry.find(family, kind).ships else no_damage()


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
