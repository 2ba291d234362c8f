"""Scores of candidates from an exported model with tasks: in one pass, from a cache of the history, in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.exports.requests.asked_scores import (
    Asked,
    check_length,
    kept_events,
    pool_rule,
    said_of,
    tokens_of,
)
from freescale.exports.requests.request_reader import RequestReader
from freescale.kernels import SequenceLayout
from freescale.model import (
    HistoryCache,
    Recommender,
    TasksHead,
    candidate_states,
    extend_caches,
    target_index,
)

Scores = list[dict[str, float] | None]
_TOKENS = 1 << 17
"""Of one pass where every candidate has a sequence of its own; bounds the memory of a request of any size."""


@torch.no_grad()
def score(
    model: Recommender,
    vectors: Tensor,
    reader: RequestReader,
    requests: Sequence[Asked],
    *,
    chunk: int | None,
) -> list[Scores]:
    """What is predicted of every user's candidates, one entry each; None for one that the model does not know.

    `vectors` are those of items, and behind them those that others share.
    """
    head = _head(model)
    limits = [None if asked.cache is not None else reader.max_events - 1 for asked in requests]
    if any(asked.cache is not None for asked in requests):
        _check_caches(model, reader)
    events = [kept_events(reader, asked, limit=limit) for asked, limit in zip(requests, limits)]
    found = [reader.names.find(asked.candidates) for asked in requests]
    tokens = [
        tokens_of(reader, asked, kept, index) for asked, kept, (_, index) in zip(requests, events, found)
    ]
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(len(each["item_index"]) for each in tokens)]).cumsum(0),
        tokens={name: torch.cat([each[name] for each in tokens]) for name in tokens[0]},
        samples={"row": torch.arange(len(requests))},
        targets=torch.tensor([len(index) for _, index in found]),
    )
    said = [said_of(reader, asked, kept, known) for asked, kept, (known, _) in zip(requests, events, found)]
    if not any(len(index) for _, index in found):
        return [[None] * len(known) for known, _ in found]
    batch, tables = reader.with_features(batch, said, vectors.device)
    batch = batch.to(vectors.device)
    states = _states(model, vectors, reader, head, batch, tables, [asked.cache for asked in requests], chunk)
    items = vectors[batch.tokens["item_index"].index_select(0, target_index(batch))]
    rows = iter(_predictions(head, head.logits(states.to(items.dtype), items)).tolist())
    names = [task.name for task in head.tasks]
    return [[dict(zip(names, next(rows))) if there else None for there in known] for known, _ in found]


@torch.no_grad()
def remember(model: Recommender, vectors: Tensor, reader: RequestReader, asked: Asked) -> HistoryCache | None:
    """All of a history but its latest event, as keys and values."""
    head = _head(model)
    if head.late:
        raise DataError(
            "this model takes candidates late: its states are what is worth keeping, not keys and values",
            next_step="score without a cache",
        )
    _check_caches(model, reader)
    events = kept_events(reader, asked, limit=None)
    tokens = reader.tokens(events.items, events.kept, asked.times, None, limit=None)
    batch = SequenceBatch.from_sequences([tokens])
    batch, tables = reader.with_features(
        batch, [said_of(reader, asked, events, np.zeros(0, bool))], vectors.device
    )
    if len(events.items) < 2:
        return asked.cache
    check_length(reader, asked.cache, len(events.items) - 1)
    batch = batch.to(vectors.device)
    events_TD = model.vectors(vectors, batch, tables)[:-1]
    times = {name: values[:-1] for name, values in batch.tokens.items() if name in ("time", "target_time")}
    kept = SequenceBatch(offsets=torch.tensor([0, len(events_TD)]), tokens=times)
    caches = None if asked.cache is None else [asked.cache]
    return extend_caches(model.encoder, events_TD, kept, caches, model=reader.manifest["fingerprint"])[0]


def _check_places(model: Recommender) -> None:
    """Caches and chunks know tokens of events and candidates alone."""
    tokens = model.tokens
    if tokens is not None and tokens.extends:
        raise DataError(
            "this model has features with tokens of their own, which caches and chunks do not know",
            next_step="score whole requests, or train with `as: join` for all features",
        )


def _check_caches(model: Recommender, reader: RequestReader) -> None:
    """Caches know the events of a history as they came."""
    _check_places(model)
    rule = pool_rule(reader.manifest)
    if rule is not None:
        raise DataError(
            f"this model looks at the last events of each {rule.column}, and caches keep the last of all",
            next_step="score whole histories, without a cache",
        )


def _head(model: Recommender) -> TasksHead:
    head = model.head
    if not isinstance(head, TasksHead):
        raise DataError(
            "this model recommends from the whole catalogue and has no tasks to score",
            next_step="use recommend(history), or train with head.kind=tasks",
        )
    return head


def _states(
    model: Recommender,
    vectors: Tensor,
    reader: RequestReader,
    head: TasksHead,
    batch: SequenceBatch,
    tables: Mapping[str, Tensor],
    caches: Sequence[HistoryCache | None],
    chunk: int | None,
) -> Tensor:
    encoder, name = model.encoder, reader.manifest["fingerprint"]
    cached = any(cache is not None for cache in caches)
    if head.late and cached:
        raise DataError("this model takes candidates late and knows no caches", next_step="score without one")
    if reader.features is not None and reader.features.fronts:
        return torch.cat([_encoded(model, vectors, part, tables) for part in _parts(batch, chunk)])
    if head.late or not (cached or chunk):
        return _encoded(model, vectors, batch, tables)
    _check_places(model)
    tokens_TD = model.vectors(vectors, batch, tables)
    return candidate_states(encoder, tokens_TD, batch, caches, chunk=chunk, model=name)


def _encoded(
    model: Recommender, vectors: Tensor, batch: SequenceBatch, tables: Mapping[str, Tensor]
) -> Tensor:
    layout = SequenceLayout(batch.offsets, device=batch.device)
    return model.encode(vectors, batch, layout, tables)[0]


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
