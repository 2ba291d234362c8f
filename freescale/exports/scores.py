"""Scores of candidates from an exported model with tasks: in one pass, from a cache of the history, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.exports.asked_scores import (
    Asked,
    check_length,
    kept_events,
    pool_rule,
    said_of,
    tokens_of,
)
from freescale.kernels import SequenceLayout
from freescale.model import HistoryCache, TasksHead, candidate_states, extend_caches, target_index

if TYPE_CHECKING:
    from freescale.exports.exported_model import ExportedModel

Scores = list[dict[str, float] | None]
_TOKENS = 1 << 17
"""Of one pass where every candidate has a sequence of its own; bounds the memory of a request of any size."""


@torch.no_grad()
def score(model: ExportedModel, requests: Sequence[Asked], *, chunk: int | None) -> list[Scores]:
    """What is predicted of every user's candidates, one entry each; None for one that the model does not know."""
    head = _head(model)
    limits = [None if asked.cache is not None else model._max_events - 1 for asked in requests]
    if any(asked.cache is not None for asked in requests):
        _check_caches(model)
    events = [kept_events(model, asked, limit=limit) for asked, limit in zip(requests, limits)]
    found = [model.names.find(asked.candidates) for asked in requests]
    tokens = [
        tokens_of(model, asked, kept, index) for asked, kept, (_, index) in zip(requests, events, found)
    ]
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(len(each["item_index"]) for each in tokens)]).cumsum(0),
        tokens={name: torch.cat([each[name] for each in tokens]) for name in tokens[0]},
        samples={"row": torch.arange(len(requests))},
        targets=torch.tensor([len(index) for _, index in found]),
    )
    said = [said_of(model, asked, kept, known) for asked, kept, (known, _) in zip(requests, events, found)]
    if not any(len(index) for _, index in found):
        return [[None] * len(known) for known, _ in found]
    batch, tables = model._with_features(batch, said)
    batch = batch.to(model.vectors.device)
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
    _check_caches(model)
    events = kept_events(model, asked, limit=None)
    tokens = model._tokens(events.items, events.kept, asked.times, None, limit=None)
    batch = SequenceBatch.from_sequences([tokens])
    batch, tables = model._with_features(batch, [said_of(model, asked, events, np.zeros(0, bool))])
    if len(events.items) < 2:
        return asked.cache
    check_length(model, asked.cache, len(events.items) - 1)
    batch = batch.to(model.vectors.device)
    vectors = model.model.vectors(model.vectors, batch, tables)[:-1]
    times = {name: values[:-1] for name, values in batch.tokens.items() if name in ("time", "target_time")}
    kept = SequenceBatch(offsets=torch.tensor([0, len(vectors)]), tokens=times)
    caches = None if asked.cache is None else [asked.cache]
    return extend_caches(model.model.encoder, vectors, kept, caches, model=model.manifest["fingerprint"])[0]


def _check_places(model: ExportedModel) -> None:
    """Caches and chunks know tokens of events and candidates alone."""
    tokens = model.model.tokens
    if tokens is not None and tokens.extends:
        raise DataError(
            "this model has features with tokens of their own, which caches and chunks do not know",
            next_step="score whole requests, or train with `as: join` for all features",
        )


def _check_caches(model: ExportedModel) -> None:
    """Caches know the events of a history as they came."""
    _check_places(model)
    rule = pool_rule(model.manifest)
    if rule is not None:
        raise DataError(
            f"this model looks at the last events of each {rule.column}, and caches keep the last of all",
            next_step="score whole histories, without a cache",
        )


def _head(model: ExportedModel) -> TasksHead:
    head = model.model.head
    if not isinstance(head, TasksHead):
        raise DataError(
            "this model recommends from the whole catalogue and has no tasks to score",
            next_step="use recommend(history), or train with head.kind=tasks",
        )
    return head


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
    if model.features is not None and model.features.fronts:
        return torch.cat([_encoded(model, part, tables) for part in _parts(batch, chunk)])
    if head.late or not (cached or chunk):
        return _encoded(model, batch, tables)
    _check_places(model)
    vectors = model.model.vectors(model.vectors, batch, tables)
    return candidate_states(encoder, vectors, batch, caches, chunk=chunk, model=name)


def _encoded(model: ExportedModel, batch: SequenceBatch, tables: Mapping[str, Tensor]) -> Tensor:
    layout = SequenceLayout(batch.offsets, device=batch.device)
    return model.model.encode(model.vectors, batch, layout, tables)[0]


def _parts(batch: SequenceBatch, chunk: int | None) -> Iterator[SequenceBatch]:
    """Sequences of one candidate each, some at a time: so many, or as many as have not too many tokens."""
    ends, first = batch.offsets.numpy()[1:], 0
    while True:
        start = int(batch.offsets[first])
        most = first + chunk if chunk else int(np.searchsorted(ends, start + _TOKENS, side="right"))
        last = min(max(most, first + 1), len(batch))
        yield batch.select(range(first, last))
        first = last
        if first >= len(batch):
            return


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
