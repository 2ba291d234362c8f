"""RequestExamples: requests with candidates from histories and from logs of impressions, as batches.

Which events are requests is said by `request_index.py`. But for anchors the request's time is that of its first
candidate, and its history is what happened strictly before: events at the same second are left out, since nobody knows
their order. A batch holds the history and behind it the candidates; outcomes are called label_NAME, zeros at events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.batches.examples import Examples, as_tensors, with_unique_items
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.features.feature_source import schema_of
from freescale.data.pools import IndexedSource, PoolIndex, PoolRule
from freescale.data.requests.anchors import AnchorRule
from freescale.data.requests.request_events import (
    RequestEvents,
    joined,
    last_of,
    picked,
    strictly_before,
)
from freescale.data.requests.request_index import (
    RequestIndex,
    index_by_number,
    index_by_runs,
    index_of_anchors,
)
from freescale.data.requests.stored_anchors import SharedSource, stored_anchors
from freescale.data.scan import row_blocks
from freescale.data.source import Histories, IntArray, SequenceSource
from freescale.errors import ConfigError, DataError
from freescale.jagged import spans


@dataclass(frozen=True, kw_only=True)
class RequestExamples(Examples):
    """Makes batches of requests of one split. Its rows are requests; of max_length one position is the candidates'.

    Args:
        outcomes: columns that tasks are made of.
        candidates: of a request, where they are cut by number.
        by: the column whose runs are requests; None: by number, or by window.
        weights: a column with a weight for every candidate; None: 1.
        window: seconds of a window; None: by number, or by column.
        logs: those of the outcomes that a logarithm of 1 + x is taken of.
        pools: the last events of each kind are the history; None: the last events of all.
        anchors: single events are requests; None: by number, by column, or by window.
    """

    outcomes: tuple[str, ...]
    candidates: int = 10
    by: str | None = None
    weights: str | None = None
    window: int | None = None
    logs: tuple[str, ...] = ()
    pools: PoolRule | None = None
    anchors: AnchorRule | None = None

    def __post_init__(self) -> None:
        of_time = None if self.window is None and self.anchors is None else "time"
        of_pools = None if self.pools is None else self.pools.column
        of_anchors = None if self.anchors is None else self.anchors.column
        named = (self.by, self.weights, of_time, of_pools, of_anchors)
        wanted = [*self.outcomes, *(name for name in named if name)]
        there = outcome_columns(self.source)
        missing = [name for name in wanted if name not in there]
        if missing:
            raise ConfigError(
                "requests need a column that the data does not have",
                got=f"{', '.join(missing)}; {self.source.name} has {', '.join(there)}",
                next_step="prepare the data with it, or name another one in head.tasks, head.by or head.anchors",
            )
        if self.by is not None and self.window is not None:
            raise ConfigError(
                "head.window and head.by both say what a request is", got=f"{self.window} s and {self.by}"
            )
        if self.max_length < 2:
            raise ConfigError("data.max_length: requests need at least 2", got=self.max_length)

    @cached_property
    def index(self) -> RequestIndex:
        """All requests of the split."""
        if self.anchors is not None:
            if isinstance(self.source, SharedSource):
                return stored_anchors(
                    self.source, self.split, self.anchors, self.pools, max_length=self.max_length
                )
            return index_of_anchors(self.source, self.split, self.anchors)
        if self.by is not None or self.window is not None:
            return index_by_runs(self.source, self.split, by=self.by, window=self.window)
        return index_by_number(self.source, self.split, candidates=self.candidates)

    def __getstate__(self) -> dict[str, Any]:
        """An index that lies in files is opened again by who gets this, not copied."""
        found = self.__dict__.get("index")
        if found is None or found.tokens is None:
            return self.__dict__
        return {name: value for name, value in self.__dict__.items() if name != "index"}

    def lengths(self) -> IntArray:
        """Tokens of every request at most: events that happened at the request's time are left out when it is read."""
        index = self.index
        if index.tokens is not None:
            return index.tokens
        counts = np.int64(1) if index.counts is None else index.counts
        return np.minimum(self._past_events, self.max_length - 1) + counts

    @cached_property
    def _past_events(self) -> IntArray:
        """[requests] events of a history before it is cut; of pools they are counted, reading through once."""
        user, start = self.index.user, self.index.start
        if self.pools is None:
            return start
        if isinstance(self.source, IndexedSource):
            return self._pool_index.counts(user, start)
        known = np.zeros(len(user), np.int64)
        order = np.argsort(user, kind="stable")
        for users in row_blocks(self.source):
            first, last = np.searchsorted(user[order], (users[0], users[-1] + 1))
            mine = order[first:last]
            histories = self.source.read(users)
            index = PoolIndex(histories.columns[self.pools.column], histories.offsets, self.pools)
            known[mine] = index.counts(user[mine] - users[0], start[mine])
        return known

    def missed(self) -> npt.NDArray[np.bool_]:
        """No request is: an item that nothing was learnt of is a candidate like any other."""
        return np.zeros(len(self.index.user), dtype=bool)

    @property
    def groups(self) -> IntArray:
        """Requests of each run of rows that are stored together."""
        return self.index.groups

    def batch(self, rows: Sequence[int] | IntArray, *, step: int = 0) -> SequenceBatch:
        """These requests as one jagged batch; `step` changes nothing, nothing is drawn."""
        rows = np.array(rows, dtype=np.int64)
        user, start, candidates = self.index.of(rows)
        indexed = (
            isinstance(self.source, IndexedSource) and self.pools is not None and self.anchors is not None
        )
        found = (self._found_by_index if indexed else self._found)(user, start, candidates)
        histories, index, offsets, counts, first, asked, of_user = found
        # Where candidates stand, and whose they are: what is said of them is written over what events say.
        at, _ = spans(offsets[1:] - counts, counts)
        of = np.repeat(np.arange(len(rows)), counts)
        item = torch.from_numpy(picked(histories.columns["item"], index).astype(np.int64))
        tokens = {"item": item, "target": item}
        if self.use_time and asked is not None:
            time = picked(histories.columns["time"], index).astype(np.int64)
            time[at] = asked[of]
            following = np.empty_like(time)
            following[:-1] = time[1:]
            following[offsets[1:] - 1] = asked
            tokens |= {"time": torch.from_numpy(time), "target_time": torch.from_numpy(following)}
        for name in (*self.outcomes, *(() if self.weights is None else (self.weights,))):
            values = np.zeros(len(item), np.float32)
            values[at] = histories.columns[name][at if index is None else index[at]]
            self._check(name, values)
            if name in self.outcomes:
                tokens[f"label_{name}"] = torch.from_numpy(values)
            if name == self.weights:
                tokens["label_weight"] = torch.from_numpy(values)
        samples = {"row": torch.from_numpy(rows)}
        if self.features is not None:
            made = self.features.requests(histories, index, at, first[of], together=self.by is not None)
            tokens |= as_tensors(made)
            of_users = self.features.samples(histories)
            samples |= as_tensors({name: values[of_user] for name, values in of_users.items()})
            samples |= as_tensors(self.features.fronts(histories, first))
        # Whose request it is: metrics group by it. A feature `user` has the ids of users.
        samples["request_user"] = torch.from_numpy(user)
        batch = SequenceBatch(
            offsets=torch.from_numpy(offsets),
            tokens=tokens,
            samples=samples,
            targets=torch.from_numpy(counts),
        )
        return batch if self.features is None else with_unique_items(batch, self.features)

    def _found(self, user: IntArray, start: IntArray, counts: IntArray) -> RequestEvents:
        """Events and candidates of requests, out of whole histories."""
        # A user may be asked several times in a batch, and is read once.
        who, which = np.unique(user, return_inverse=True)
        histories = self.source.read(who)
        base, events = histories.offsets[which], start
        asked = None
        if "time" in histories.columns:
            asked = histories.columns["time"][base + start]
            if self.anchors is None:
                events = strictly_before(histories, base, events, asked)
        past, past_offsets = self._history(histories, which, events)
        if self.anchors is not None and asked is not None:
            known = np.diff(past_offsets) > 0
            asked = np.where(known, histories.columns["time"][last_of(past, past_offsets)], asked)
        shown, _ = spans(base + start, counts)
        # Candidates stand right behind the history, whatever was left out between.
        index, offsets = joined(past, past_offsets, shown, counts)
        return RequestEvents(histories, index, offsets, counts, base + start, asked, which)

    def _found_by_index(self, user: IntArray, start: IntArray, counts: IntArray) -> RequestEvents:
        """The same of anchors, where a source finds single events: nothing but them is read."""
        source = self.source
        assert isinstance(source, IndexedSource)
        past, past_offsets = self._pool_index.spans(user, start, most=self.max_length - 1)
        places, offsets = joined(past, past_offsets, source.offsets[user] + start, counts)
        histories = source.events(user, places, offsets)
        time, first = histories.columns["time"], offsets[1:] - 1
        asked = time[np.where(np.diff(past_offsets) > 0, first - 1, first)]
        return RequestEvents(histories, None, offsets, counts, first, asked, np.arange(len(user)))

    @property
    def _pool_index(self) -> PoolIndex:
        assert isinstance(self.source, IndexedSource)
        assert self.pools is not None
        return self.source.pools(self.pools)

    def _history(self, histories: Histories, which: IntArray, events: IntArray) -> tuple[IntArray, IntArray]:
        """(places, offsets) of what is kept: of the histories with these numbers, of each so many first events."""
        most = self.max_length - 1
        if self.pools is None:
            kept = np.minimum(events, most)
            return spans(histories.offsets[which] + events - kept, kept)
        index = PoolIndex(histories.columns[self.pools.column], histories.offsets, self.pools)
        return index.spans(which, events, most=most)

    def candidate_values(self, rows: IntArray) -> dict[str, npt.NDArray[np.float32]]:
        """Outcomes of the candidates of these requests, one request behind the other."""
        user, start, counts = self.index.of(rows)
        who, which = np.unique(user, return_inverse=True)
        histories = self.source.read(who)
        index, _ = spans(histories.offsets[which] + start, counts)
        found = {name: histories.columns[name][index].astype(np.float32) for name in self.outcomes}
        for name, values in found.items():
            self._check(name, values)
        return found

    def _check(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """Refuse labels and weights that nothing can be learnt from; what is missing is no mistake."""
        least = 0.0 if name == self.weights else -np.inf
        bad = np.isinf(values) | (values < least)
        if name in self.logs:
            bad |= values <= -1
        if bad.any():
            key = "head.weights" if name == self.weights else "head.tasks"
            raise DataError(
                f"{key}: {name} has a value that no {'weight' if name == self.weights else 'label'} can be made of",
                got=f"{values[bad][0]:g}",
                allowed="numbers from 0 on"
                if name == self.weights
                else "numbers above -1, whose ln(1 + x) is taken"
                if name in self.logs
                else "finite numbers; NaN says that there is none",
                next_step="leave such rows out, or prepare the data with NaN for them",
            )


def outcome_columns(source: SequenceSource) -> tuple[str, ...]:
    """Columns of events that tasks can be made of: one number an event."""
    listed = [each.name for each in schema_of(source).stored("event") if each.kind not in ("ids", "vector")]
    return tuple(dict.fromkeys([*source.features, *listed]))
