"""Export: weights as safetensors, item vectors as Parquet, a manifest; and the few lines that serve from them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale import __version__, registry
from freescale.data import IntArray, ItemId, ItemNames, SequenceBatch
from freescale.embedding import as_compute
from freescale.errors import CheckpointError, ConfigError, DataError
from freescale.kernels import SequenceLayout
from freescale.model import (
    Compressor,
    Recommender,
    TokenCache,
    compresses,
    export_facts,
    make_encoder,
    make_head,
    retrieves,
)
from freescale.train.item_vectors import ItemEncoder
from freescale.train.state.recommendations import Request, best, hide, in_chunks, is_batch, one_each

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


@dataclass(frozen=True)
class ExportedModel:
    """A trained model that recommends; needs nothing but the exported folder.

    Examples:
        >>> model = load_export("export/")
        >>> model.recommend([31, 7, 12], k=5)
        [(88, 0.71), (3, 0.66), ...]
        >>> model.recommend([[31, 7, 12], [5]], k=5)
        [[(88, 0.71), ...], [(12, 0.43), ...]]
    """

    model: Recommender
    items: IntArray
    vectors: Tensor
    manifest: dict[str, Any]
    names: ItemNames

    @torch.no_grad()
    def recommend(
        self,
        history: Sequence[Any],
        *,
        times: Sequence[Any] | None = None,
        request_time: int | Sequence[int] | None = None,
        k: int = 10,
        filter_seen: bool | None = None,
        cache: TokenCache | Sequence[TokenCache | None] | None = None,
        exclude: Sequence[Any] = (),
    ) -> list[Any]:
        """The k best next items after a history (oldest event first), as (item, score).

        Ties go to the item that stands first in items.parquet, as in evaluation.

        A list of histories gives a list of such answers, one a user, thousands of them in one go. Then `times` and
        `cache` are lists of one a user; `request_time` and `exclude` may be that, or the same for all.

        Args:
            history: item ids as in the training data, numbers or text; those the model does not know are left out,
                `unknown` names them. With a cache: the events after those in it.
            times: their times in seconds since 1970 (UTC), as `prepare` stores them; needed by models with a time bias.
            request_time: when the recommendation is asked for; the last event's time unless given.
            k: number of items, at least 1; fewer come back where fewer are left to recommend.
            filter_seen: whether to leave out items of the history; None: as the model was evaluated.
            cache: the history before, as `compress` made it.
            exclude: more items not to recommend; a cache does not know which items it was made of.
        """
        if k < 1:
            raise DataError("k must be at least 1", got=k, next_step="k=10 gives the ten best items")
        batch = is_batch(history)
        histories = list(history) if batch else [history]
        num, alone = len(histories), not batch
        each = zip(
            histories,
            one_each("times", times, num, shared=alone),
            one_each("request_time", request_time, num, shared=alone or not hasattr(request_time, "__len__")),
            one_each("cache", cache, num, shared=alone),
            one_each("exclude", exclude, num, shared=alone or not is_batch(exclude)),
        )
        hides = self.filter_seen if filter_seen is None else filter_seen
        requests = [
            self._request(n if batch else None, *given, filter_seen=hides) for n, given in enumerate(each)
        ]
        answers = [
            [(self.names[number], score) for number, score in answer]
            for chunk in in_chunks(requests, num_items=len(self.items))
            for answer in best(hide(self._scores(chunk), chunk), k)
        ]
        return answers if batch else answers[0]

    @property
    def filter_seen(self) -> bool:
        """Whether items of a history are left out unless a request says otherwise: as the model was evaluated."""
        evaluation = self.manifest.get("evaluation") or {}
        return bool(evaluation.get("filter_seen", True))

    def _request(
        self,
        user: int | None,
        history: Sequence[ItemId],
        times: Sequence[int] | None,
        request_time: int | None,
        cache: TokenCache | None,
        exclude: Sequence[ItemId],
        *,
        filter_seen: bool,
    ) -> Request:
        """One user of a batch, by number, or the only one."""
        known, index = self._index_of(history)
        if len(index) == 0:
            who = "" if user is None else f"user {user} of the batch: "
            raise DataError(
                "no event of the history is an item the model knows", got=f"{who}{list(history)[:10]}"
            )
        limit = int(self.manifest["encoder"]["max_length"]) if cache is None else None
        tokens = self._tokens(index, known, times, request_time, limit=limit)
        hidden = [index] if filter_seen else []
        return Request(tokens, torch.cat([*hidden, self._index_of(exclude)[1]]), cache)

    def _scores(self, requests: Sequence[Request]) -> Tensor:
        """[U, N] the score of every item for every user."""
        head = self.model.head
        assert retrieves(head)  # load_export has refused others
        states = self.vectors.new_empty(len(requests), self.vectors.shape[1])
        for cached in (False, True):
            users = [n for n, request in enumerate(requests) if (request.cache is not None) == cached]
            if users:
                states[users] = self._last_states([requests[n] for n in users]).to(states.dtype)
        return head.queries(states) @ self._candidates.T

    def _last_states(self, requests: Sequence[Request]) -> Tensor:
        """[U, D] the state after the last event; all with a cache, or all without."""
        batch = SequenceBatch.from_sequences([request.tokens for request in requests])
        caches = [request.cache for request in requests]
        if caches[0] is None:
            states = self.model.states(self.vectors, batch, SequenceLayout(batch.offsets))
        else:
            states = self._compressor().states(self.vectors[batch.tokens["item_index"]], batch, caches)
        return states.index_select(0, batch.offsets[1:] - 1)

    @cached_property
    def _candidates(self) -> Tensor:
        """All item vectors as they enter the dot product."""
        head = self.model.head
        assert retrieves(head)
        return head.candidates(self.vectors)

    def unknown(self, history: Sequence[ItemId]) -> list[ItemId]:
        """Items of a history that the model does not know, and that `recommend` leaves out; each once."""
        known, _ = self.names.find(history)
        return list(dict.fromkeys(item for item, there in zip(history, known) if not there))

    def compress(
        self,
        history: Sequence[ItemId],
        *,
        times: Sequence[int] | None = None,
        next_time: int | None = None,
        cache: TokenCache | None = None,
    ) -> TokenCache | None:
        """The history as a token cache, to be kept and given to `recommend` with the events that follow.

        With a cache its segments stay as they are and these events are added behind them. A model that learnt segments
        of 350 events does best on such: add events when a whole segment has come together, or start from
        `cache.whole_segments()` and give the events of the short one again.

        Args:
            history: item ids, oldest first; without a cache at most the latest the model has learnt are used.
            times: their times in seconds since 1970 (UTC), as `prepare` stores them; needed by models with a time bias.
            next_time: time of the event after these, required by models with a time bias.
            cache: what is compressed already.
        """
        compressor = self._compressor()
        known, index = self._index_of(history)
        if len(index) == 0:
            return cache
        if self.manifest["encoder"]["time_bias"] and next_time is None:
            raise DataError(
                "this model was trained with time stamps",
                next_step="pass next_time=..., the time of the first event that is not compressed",
            )
        latest = int(self.manifest["encoder"]["max_length"]) - compressor.encoder.rule.recent
        tokens = self._tokens(index, known, times, next_time, limit=latest if cache is None else None)
        batch = SequenceBatch.from_sequences([tokens])
        return compressor.compress(self.vectors[batch.tokens["item_index"]], batch, [cache])[0]

    def _compressor(self) -> Compressor:
        encoder = self.model.encoder
        if not compresses(encoder):
            raise DataError(
                "this model was trained on whole histories and has no token caches",
                next_step="train with segments.recent=50 and export again",
            )
        return Compressor(encoder, model=self.manifest["fingerprint"], dtype=self.vectors.dtype)

    def _index_of(self, history: Sequence[ItemId]) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], Tensor]:
        known, index = self.names.find(history)
        return known, torch.from_numpy(index)

    def _tokens(
        self,
        index: Tensor,
        known: np.ndarray[Any, np.dtype[np.bool_]],
        times: Sequence[int] | None,
        request_time: int | None,
        *,
        limit: int | None,
    ) -> dict[str, Tensor]:
        """The features of a history's known events, the latest of them."""
        tokens = {"item_index": index}
        if self.manifest["encoder"]["time_bias"]:
            if times is None:
                raise DataError("this model was trained with time stamps", next_step="pass times=[...]")
            if len(times) != len(known):
                raise DataError(
                    "every event needs its time stamp", got=f"{len(known)} events, {len(times)} times"
                )
            stamps = torch.from_numpy(np.asarray(times, dtype=np.int64)[known])
            asked_at = int(stamps[-1]) if request_time is None else request_time
            tokens |= {"time": stamps, "target_time": torch.cat([stamps[1:], torch.tensor([asked_at])])}
        return {name: values if limit is None else values[-limit:] for name, values in tokens.items()}


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
    if not retrieves(head):
        raise ValueError(f"head {facts['name']!r} has no queries and candidates")
    return Recommender(encoder=make_encoder(**manifest["encoder"], dropout=0.0), head=head)


def _first_head(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The head of an export of version 1."""
    return {"name": "retrieval", "options": {"normalize": manifest["normalize"]}}
