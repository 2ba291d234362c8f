"""Scores of candidates from an exported model with tasks: in one pass, from a cache of the history, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from freescale.data import ItemId, SequenceBatch
from freescale.errors import DataError
from freescale.kernels import SequenceLayout
from freescale.model import HistoryCache, TasksHead, candidate_states, extend_caches
from freescale.train.state.recommendations import whole_seconds

if TYPE_CHECKING:
    from freescale.train.state.exported_model import ExportedModel

Scores = list[dict[str, float] | None]


@torch.no_grad()
def score(
    model: ExportedModel,
    histories: Sequence[Sequence[ItemId]],
    candidates: Sequence[Sequence[ItemId]],
    *,
    times: Sequence[Sequence[int] | None],
    request_times: Sequence[int | None],
    caches: Sequence[HistoryCache | None],
    chunk: int | None,
) -> list[Scores]:
    """What is predicted of every user's candidates, one entry each; None for one that the model does not know."""
    head = _head(model)
    found = [model.names.find(shown) for shown in candidates]
    requests = [
        _request(model, n, *given)
        for n, given in enumerate(zip(histories, times, request_times, caches, (index for _, index in found)))
    ]
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(len(tokens["item_index"]) for tokens, _ in requests)]).cumsum(0),
        tokens={name: torch.cat([tokens[name] for tokens, _ in requests]) for name in requests[0][0]},
        targets=torch.tensor([count for _, count in requests]),
    )
    states = _states(model, head, batch, caches, chunk)
    assert batch.targets is not None
    ends = batch.offsets[1:].tolist()
    own = [torch.arange(end - k, end) for end, k in zip(ends, batch.targets.tolist())]
    items = model.vectors[batch.tokens["item_index"][torch.cat(own)]]
    values = _predictions(head, head.logits(states.to(items.dtype), items)).tolist()
    answers: list[Scores] = []
    rows = iter(values)
    names = [task.name for task in head.tasks]
    for known, _ in found:
        answers.append([dict(zip(names, next(rows))) if there else None for there in known])
    return answers


@torch.no_grad()
def remember(
    model: ExportedModel,
    history: Sequence[ItemId],
    *,
    times: Sequence[int] | None,
    cache: HistoryCache | None,
) -> HistoryCache | None:
    """All of a history but its latest event, as keys and values."""
    head = _head(model)
    if head.late:
        raise DataError(
            "this model takes candidates late: its states are what is worth keeping, not keys and values",
            next_step="score without a cache",
        )
    known, index = model._index_of(history)
    tokens = model._tokens(index, known, times, None, limit=None)
    kept = {name: values[:-1] for name, values in tokens.items()}
    if len(index) < 2:
        return cache
    _check_length(model, cache, len(index) - 1)
    batch = SequenceBatch.from_sequences([kept])
    caches = extend_caches(
        model.model.encoder,
        model.vectors[kept["item_index"]],
        batch,
        None if cache is None else [cache],
        model=model.manifest["fingerprint"],
    )
    return caches[0]


def _head(model: ExportedModel) -> TasksHead:
    head = model.model.head
    if not isinstance(head, TasksHead):
        raise DataError(
            "this model recommends from the whole catalogue and has no tasks to score",
            next_step="use recommend(history), or train with head.kind=tasks",
        )
    return head


def _request(
    model: ExportedModel,
    user: int,
    history: Sequence[ItemId],
    times: Sequence[int] | None,
    request_time: int | None,
    cache: HistoryCache | None,
    candidates: np.ndarray[Any, np.dtype[np.int64]],
) -> tuple[dict[str, Tensor], int]:
    """Events and candidates of a user, and how many candidates there are."""
    timed = bool(model.manifest["encoder"]["time_bias"])
    known, index = model._index_of(history)
    if cache is not None and not len(index):
        raise DataError(
            "a cache holds all but the latest event: give that one with it", got=f"user {user} without events"
        )
    limit = int(model.manifest["encoder"]["max_length"]) - 1
    if cache is not None:
        _check_length(model, cache, len(index))
    if len(index):
        tokens = model._tokens(index, known, times, request_time, limit=limit if cache is None else None)
    else:
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = {"item_index": nothing, **({"time": nothing, "target_time": nothing} if timed else {})}
    shown = torch.from_numpy(candidates.astype(np.int64))
    joined = {"item_index": torch.cat([tokens["item_index"], shown])}
    if timed:
        if request_time is None and not len(index):
            raise DataError(
                "a request without history must say when it comes", next_step="pass request_time=SECONDS"
            )
        asked = int(tokens["time"][-1] if request_time is None else whole_seconds([request_time])[0])
        at = torch.full((len(shown),), asked)
        joined |= {name: torch.cat([tokens[name], at]) for name in ("time", "target_time")}
    return joined, len(shown)


def _check_length(model: ExportedModel, cache: HistoryCache | None, events: int) -> None:
    limit = int(model.manifest["encoder"]["max_length"]) - 1
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
    caches: Sequence[HistoryCache | None],
    chunk: int | None,
) -> Tensor:
    encoder, name = model.model.encoder, model.manifest["fingerprint"]
    cached = any(cache is not None for cache in caches)
    if head.late and cached:
        raise DataError("this model takes candidates late and knows no caches", next_step="score without one")
    if head.late or not (cached or chunk):
        return model.model.encode(model.vectors, batch, SequenceLayout(batch.offsets))[0]
    vectors = model.vectors[batch.tokens["item_index"]]
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
