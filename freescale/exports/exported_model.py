"""A trained model that answers: what a service needs of an exported folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freescale.data import IntArray, ItemId, ItemNames, SequenceBatch
from freescale.errors import DataError
from freescale.exports.requests import scores
from freescale.exports.requests.asked_values import plain_list, whole_number, yes_or_no
from freescale.exports.requests.recommendations import (
    Request,
    best,
    features_each,
    hide,
    in_chunks,
    is_batch,
    one_each,
)
from freescale.exports.requests.request_reader import RequestReader
from freescale.exports.served.served_features import ServedFeatures, request_needs
from freescale.exports.served.served_tables import SharedRows
from freescale.kernels import SequenceLayout
from freescale.model import Compressor, HistoryCache, Recommender, TokenCache, compresses, retrieves


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
    features: ServedFeatures | None = None
    shared: SharedRows | None = None

    def to(self, device: torch.device | str) -> ExportedModel:
        """The same model where it is to compute, for instance "cuda"; this one stays as it is."""
        place = torch.device(device)
        return replace(self, model=copy.deepcopy(self.model).to(place), vectors=self.vectors.to(place))

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
        features: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
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
            features: of the events of the history and of the user, by name, in the words of the training data: a list
                of one value an event, or one value. None stands for what is missing. Of a batch, each name has a list
                of one a user; or give a list of such dicts. `needs` says which the model asks for.
        """
        if not retrieves(self.model.head):
            raise DataError(
                "this model ranks candidates and knows no best of all items",
                next_step="use score(history, candidates)",
            )
        k = whole_number("k", k, next_step="k=10 gives the ten best items")
        hides = self.filter_seen if filter_seen is None else yes_or_no("filter_seen", filter_seen)
        history, exclude = plain_list("history", history), plain_list("exclude", exclude)
        batch = is_batch(history)
        histories = list(history) if batch else [history]
        num, alone = len(histories), not batch
        each = zip(
            histories,
            one_each("times", times, num, shared=alone),
            one_each("request_time", request_time, num, shared=alone or not hasattr(request_time, "__len__")),
            one_each("cache", cache, num, shared=alone),
            one_each("exclude", exclude, num, shared=alone or not is_batch(exclude)),
            features_each(features, num, alone=alone),
        )
        requests = [
            self._request(n if batch else None, *given, filter_seen=hides) for n, given in enumerate(each)
        ]
        answers = [
            [(self.names[number], score) for number, score in answer]
            for chunk in in_chunks(requests, num_items=len(self.items))
            for answer in best(hide(self._scores(chunk), chunk), k)
        ]
        return answers if batch else answers[0]

    def score(
        self,
        history: Sequence[Any],
        candidates: Sequence[Any],
        *,
        times: Sequence[Any] | None = None,
        request_time: int | Sequence[int] | None = None,
        cache: HistoryCache | Sequence[HistoryCache | None] | None = None,
        chunk: int | None = None,
        features: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        candidate_features: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What the tasks predict of every candidate: {task: probability or number}, None where it is unknown.

        Candidates do not change each other's numbers, nor does a cache or a chunk. Lists of histories and of candidates
        give a list of answers, one a user.

        Args:
            history: item ids, oldest first; may be empty. With a cache: the events after those in it.
            candidates: item ids.
            times: of the events, in seconds since 1970 (UTC); needed by models with a time bias.
            request_time: when they are asked for; the last event's time unless given.
            cache: the history before, as `remember` made it.
            chunk: candidates of a user computed at a time, to bound memory; all unless given. Of models whose
                candidates have sequences of their own: sequences of a pass, as many as fit unless given.
            features: of the events of the history, of the user and of the request, as those of `recommend`.
            candidate_features: of the candidates, a list of one value a candidate; features of events that are known
                before them. Of a batch, each name has a list of one a user; or give a list of such dicts.
        """
        history, candidates = plain_list("history", history), plain_list("candidates", candidates)
        if chunk is not None:
            chunk = whole_number("chunk", chunk, next_step="leave it out to compute all at once")
        batch = is_batch(candidates)
        histories = list(history) if batch else [history]
        num, alone = len(histories), not batch
        if batch and len(candidates) != num:
            raise DataError(
                "every history needs its candidates", got=f"{num} histories, {len(candidates)} lists"
            )
        each = zip(
            histories,
            list(candidates) if batch else [candidates],
            one_each("times", times, num, shared=alone),
            one_each("request_time", request_time, num, shared=alone or not hasattr(request_time, "__len__")),
            one_each("cache", cache, num, shared=alone),
            features_each(features, num, alone=alone),
            features_each(candidate_features, num, alone=alone),
            [f"user {n} of the batch: " if batch else "" for n in range(num)],
        )
        answers = scores.score(
            self.model, self.vectors, self._reader, [scores.Asked(*given) for given in each], chunk=chunk
        )
        return answers if batch else answers[0]

    def remember(
        self,
        history: Sequence[ItemId],
        *,
        times: Sequence[int] | None = None,
        cache: HistoryCache | None = None,
        features: Mapping[str, Any] | None = None,
    ) -> HistoryCache | None:
        """Keys and values of all but the latest event, to be given to `score` with that event and what follows.

        What the latest event becomes depends on when the next request comes; all others stay as they are, so that a
        cache is good for any later request. None where there is nothing to keep.

        Args:
            history: item ids, oldest first. With a cache: the events after those in it.
            times: their times; needed by models with a time bias.
            cache: what is kept already.
            features: of these events and of the user, as those of `score`; nothing is kept of a request.
        """
        asked = scores.Asked(
            plain_list("history", history), (), times=times, cache=cache, features=features or {}
        )
        return scores.remember(self.model, self.vectors, self._reader, asked)

    @property
    def filter_seen(self) -> bool:
        """Whether items of a history are left out unless a request says otherwise: as the model was evaluated."""
        evaluation = self.manifest.get("evaluation") or {}
        return bool(evaluation.get("filter_seen", True))

    @cached_property
    def _reader(self) -> RequestReader:
        return RequestReader(
            manifest=self.manifest,
            items=self.items,
            names=self.names,
            features=self.features,
            shared=self.shared,
            inputs=self.model.tokens,
        )

    def _request(
        self,
        user: int | None,
        history: Sequence[ItemId],
        times: Sequence[int] | None,
        request_time: int | None,
        cache: TokenCache | None,
        exclude: Sequence[ItemId],
        features: Mapping[str, Any],
        *,
        filter_seen: bool,
    ) -> Request:
        """One user of a batch, by number, or the only one."""
        known, index = self._reader.index_of(history)
        who = "" if user is None else f"user {user} of the batch: "
        if len(index) == 0:
            raise DataError(
                "no event of the history is an item the model knows",
                got=f"{who}{list(history)[:10]}",
                next_step="give items by the ids of the data it was trained on",
            )
        limit = self._reader.max_events if cache is None else None
        tokens = self._reader.tokens(index, known, times, request_time, limit=limit)
        hidden = [index[index < len(self.items)]] if filter_seen else []
        said = self._reader.features_said(features, known, limit, who=who)
        left_out = torch.from_numpy(self.names.find(exclude)[1])
        return Request(tokens, torch.cat([*hidden, left_out]), cache, said)

    @property
    def needs(self) -> list[str]:
        """What a request must say of features, a line each; nothing where the model looks at items and times alone."""
        return request_needs(self.manifest)

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
        batch, tables = self._reader.with_features(
            batch, [request.features for request in requests], self.vectors.device
        )
        batch = batch.to(self.vectors.device)
        caches = [request.cache for request in requests]
        if caches[0] is None:
            layout = SequenceLayout(batch.offsets, device=self.vectors.device)
            states = self.model.states(self.vectors, batch, layout, tables)
        else:
            states = self._compressor().states(self.model.vectors(self.vectors, batch, tables), batch, caches)
        return states.index_select(0, (batch.offsets[1:] - 1).to(states.device))

    @cached_property
    def _candidates(self) -> Tensor:
        """All item vectors as they enter the dot product."""
        head = self.model.head
        assert retrieves(head)
        return head.candidates(self.vectors[: len(self.items)])

    def unknown(self, history: Sequence[ItemId]) -> list[ItemId]:
        """Items of a history that the model does not know, and that `recommend` leaves out; each once."""
        history = plain_list("history", history)
        known, _ = self._reader.index_of(history)
        return list(dict.fromkeys(item for item, there in zip(history, known) if not there))

    def compress(
        self,
        history: Sequence[ItemId],
        *,
        times: Sequence[int] | None = None,
        next_time: int | None = None,
        cache: TokenCache | None = None,
        features: Mapping[str, Any] | None = None,
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
            features: as those of `recommend`.
        """
        compressor, history = self._compressor(), plain_list("history", history)
        known, index = self._reader.index_of(history)
        if len(index) == 0:
            return cache
        if self.manifest["encoder"]["time_bias"] and next_time is None:
            raise DataError(
                "this model was trained with time stamps",
                next_step="pass next_time=..., the time of the first event that is not compressed",
            )
        latest = None if cache is not None else self._reader.max_events - compressor.encoder.rule.recent
        tokens = self._reader.tokens(index, known, times, next_time, limit=latest)
        said = self._reader.features_said(features or {}, known, latest, who="")
        batch, tables = self._reader.with_features(
            SequenceBatch.from_sequences([tokens]), [said], self.vectors.device
        )
        batch = batch.to(self.vectors.device)
        return compressor.compress(self.model.vectors(self.vectors, batch, tables), batch, [cache])[0]

    def _compressor(self) -> Compressor:
        encoder = self.model.encoder
        if not compresses(encoder):
            raise DataError(
                "this model was trained on whole histories and has no token caches",
                next_step="train with segments.recent=50 and export again",
            )
        return Compressor(encoder, model=self.manifest["fingerprint"], dtype=self.vectors.dtype)
