"""Scores of candidates from an exported model with tasks: in one pass, from a cache of the history, in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.data import FeatureRequest, ItemId, SequenceBatch
from freescale.errors import DataError
from freescale.kernels import SequenceLayout
from freescale.model import HistoryCache, TasksHead, candidate_states, extend_caches, target_index
from freescale.train.exports.recommendations import whole_seconds

if TYPE_CHECKING:
    from freescale.train.exports.exported_model import ExportedModel

Scores = list[dict[str, float] | None]


class Asked(NamedTuple):
    """One user's request.

    Args:
        history: item ids.
        candidates: item ids.
        times: of the history.
        request_time: when it is asked.
        cache: what is kept of the history before.
        features: of events, the user and the request, by name.
        shown: features of candidates, by name.
        who: what messages begin with.
    """

    history: Sequence[ItemId]
    candidates: Sequence[ItemId]
    times: Sequence[int] | None = None
    request_time: int | None = None
    cache: HistoryCache | None = None
    features: Mapping[str, Any] = MappingProxyType({})
    shown: Mapping[str, Any] = MappingProxyType({})
    who: str = ""


@torch.no_grad()
def score(model: ExportedModel, requests: Sequence[Asked], *, chunk: int | None) -> list[Scores]:
    """What is predicted of every user's candidates, one entry each; None for one that the model does not know."""
    head = _head(model)
    found = [model.names.find(asked.candidates) for asked in requests]
    tokens = [_tokens(model, asked, index) for asked, (_, index) in zip(requests, found)]
    counts = [len(index) for _, index in found]
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(len(each["item_index"]) for each in tokens)]).cumsum(0),
        tokens={name: torch.cat([each[name] for each in tokens]) for name in tokens[0]},
        samples={"row": torch.arange(len(requests))},
        targets=torch.tensor(counts),
    )
    said = [
        _said(model, asked, known, None if asked.cache is not None else model._max_events - 1)
        for asked, (known, _) in zip(requests, found)
    ]
    batch, tables = model._with_features(batch, said)
    device = model.vectors.device
    batch = batch.to(device)
    states = _states(model, head, batch, tables, [asked.cache for asked in requests], chunk)
    items = model.vectors[batch.tokens["item_index"].index_select(0, target_index(batch))]
    rows = iter(_predictions(head, head.logits(states.to(items.dtype), items)).tolist())
    names = [task.name for task in head.tasks]
    return [[dict(zip(names, next(rows))) if there else None for there in known] for known, _ in found]


@torch.no_grad()
def remember(model: ExportedModel, asked: Asked) -> HistoryCache | None:
    """All of a history but its latest event, as keys and values."""
    head = _head(model)
    if head.late:
        raise DataError(
            "this model takes candidates late: its states are what is worth keeping, not keys and values",
            next_step="score without a cache",
        )
    _check_places(model)
    known, index = model._index_of(asked.history)
    tokens = model._tokens(index, known, asked.times, None, limit=None)
    batch = SequenceBatch.from_sequences([tokens])
    batch, tables = model._with_features(batch, [_said(model, asked, np.zeros(0, bool), None)])
    if len(index) < 2:
        return asked.cache
    _check_length(model, asked.cache, len(index) - 1)
    batch = batch.to(model.vectors.device)
    vectors = model.model.vectors(model.vectors, batch, tables)[:-1]
    times = {name: values[:-1] for name, values in batch.tokens.items() if name in ("time", "target_time")}
    kept = SequenceBatch(offsets=torch.tensor([0, len(vectors)]), tokens=times)
    caches = None if asked.cache is None else [asked.cache]
    return extend_caches(model.model.encoder, vectors, kept, caches, model=model.manifest["fingerprint"])[0]


def _said(
    model: ExportedModel, asked: Asked, shown: np.ndarray[Any, np.dtype[np.bool_]], limit: int | None
) -> FeatureRequest:
    """What is said of the events and of the candidates that the model knows, one behind the other.

    A candidate has no outcomes, and an event nothing of the request: None stands there.
    """
    known, _ = model.names.find(asked.history)
    events, num = len(known), len(known) + len(shown)
    kept = np.flatnonzero(known)
    kept = np.concatenate([kept if limit is None else kept[-limit:], events + np.flatnonzero(shown)])
    if model.features is None:
        return model._features({**asked.features, **asked.shown}, known, None, who=asked.who)
    given: dict[str, Any] = dict(asked.features)
    own = dict(asked.shown)
    for name, feature in model.features.reader.needed.items():
        if not len(shown) and feature.of == "request":
            given.setdefault(name, None)  # nobody asks yet
        if name not in given or feature.of == "user":
            continue
        if feature.of == "request":
            given[name] = [None] * events + [given[name]] * len(shown)
            continue
        before = _listed(
            given[name], events, f"{asked.who}{name} needs one value for every event of the history"
        )
        after: list[Any] = [None] * len(shown)
        if not feature.outcome and len(shown):
            if name not in own:
                raise DataError(
                    f"{asked.who}the model needs to know {name} of every candidate",
                    got=", ".join(asked.shown) or "no features of candidates",
                    next_step=f"candidate_features={{{name!r}: [...]}}; None says that there is no value",
                )
            after = _listed(
                own.pop(name), len(shown), f"{asked.who}{name} needs one value for every candidate"
            )
        given[name] = before + after
    if own and len(shown):
        raise DataError(
            f"{asked.who}candidates have no such feature that this model looks at",
            got=", ".join(own),
            next_step="outcomes are not known yet; those of items are in their vectors; those of the request go into "
            "features=",
        )
    said = FeatureRequest(given, num, kept.astype(np.int64), asked.who)
    model.features.reader.check(said)
    return said


def _listed(value: Any, count: int, what: str) -> list[Any]:
    """One value for each; None stands for none of any."""
    if value is None:
        return [None] * count
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
        got = (
            f"{len(value)} values"
            if hasattr(value, "__len__") and not isinstance(value, str)
            else repr(value)
        )
        raise DataError(what, got=f"{got} for {count}", next_step="None stands for a value that is missing")
    return list(value)


def _check_places(model: ExportedModel) -> None:
    """Caches and chunks know tokens of events and candidates alone."""
    tokens = model.model.tokens
    if tokens is not None and tokens.extends:
        raise DataError(
            "this model has features with tokens of their own, which caches and chunks do not know",
            next_step="score whole requests, or train with `as: join` for all features",
        )


def _head(model: ExportedModel) -> TasksHead:
    head = model.model.head
    if not isinstance(head, TasksHead):
        raise DataError(
            "this model recommends from the whole catalogue and has no tasks to score",
            next_step="use recommend(history), or train with head.kind=tasks",
        )
    return head


def _tokens(
    model: ExportedModel, asked: Asked, candidates: np.ndarray[Any, np.dtype[np.int64]]
) -> dict[str, Tensor]:
    """Events and candidates of a user."""
    timed = bool(model.manifest["encoder"]["time_bias"])
    known, index = model._index_of(asked.history)
    cache, request_time = asked.cache, asked.request_time
    if cache is not None and not len(index):
        raise DataError(
            f"{asked.who}a cache holds all but the latest event: give that one with it", got="no event"
        )
    if cache is not None:
        _check_length(model, cache, len(index))
    limit = None if cache is not None else model._max_events - 1
    if len(index):
        tokens = model._tokens(index, known, asked.times, request_time, limit=limit)
    else:
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = {"item_index": nothing, **({"time": nothing, "target_time": nothing} if timed else {})}
    shown = torch.from_numpy(candidates.astype(np.int64))
    joined = {"item_index": torch.cat([tokens["item_index"], shown])}
    if timed:
        if request_time is None and not len(index):
            raise DataError(
                f"{asked.who}a request without history must say when it comes",
                next_step="pass request_time=SECONDS",
            )
        moment = int(tokens["time"][-1] if request_time is None else whole_seconds([request_time])[0])
        at = torch.full((len(shown),), moment)
        joined |= {name: torch.cat([tokens[name], at]) for name in ("time", "target_time")}
    return joined


def _check_length(model: ExportedModel, cache: HistoryCache | None, events: int) -> None:
    limit = model._max_events - 1
    total = events + (0 if cache is None else len(cache))
    if total > limit:
        raise DataError(
            "a history is longer than the model has learnt",
            got=f"{total} events",
            allowed=f"at most {limit}",
            next_step="keep the user's latest events again, without a cache",
        )


def _states(
    model: ExportedModel,
    head: TasksHead,
    batch: SequenceBatch,
    tables: Mapping[str, Tensor],
    caches: Sequence[HistoryCache | None],
    chunk: int | None,
) -> Tensor:
    encoder, name = model.model.encoder, model.manifest["fingerprint"]
    cached = any(cache is not None for cache in caches)
    if head.late and cached:
        raise DataError("this model takes candidates late and knows no caches", next_step="score without one")
    if head.late or not (cached or chunk):
        layout = SequenceLayout(batch.offsets, device=batch.device)
        return model.model.encode(model.vectors, batch, layout, tables)[0]
    _check_places(model)
    vectors = model.model.vectors(model.vectors, batch, tables)
    return candidate_states(encoder, vectors, batch, caches, chunk=chunk, model=name)


def _predictions(head: TasksHead, logits: Tensor) -> Tensor:
    """Probabilities of binary tasks, and numbers as they are in the data."""
    columns = []
    for n, task in enumerate(head.tasks):
        column = logits[:, n]
        if task.kind == "binary":
            column = torch.sigmoid(column)
        elif task.log:
            column = torch.expm1(column)
        columns.append(column)
    return torch.stack(columns, dim=1)
