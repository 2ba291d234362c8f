"""RequestExamples: requests with candidates from histories and from logs of impressions.

    by number    the training events of a user, cut from the end into runs of k: each run is a request, the events
                 before it its history. Every event but a user's first is a label once. Needs no reading to be planned.
    by column    neighbouring events with the same value of a column ("request", or "time" for what was shown together)
                 are a request: one row an impression. Read through once, to know how long they are.
    by window    all that a user did in one window of so many seconds is a request, and what was before it its history:
                 windows begin at 0, one, two, ... times their length since 1970. Read through once, too.

    anchors      single events with a label and enough of a history, the latest days held back whole (`anchors.py`).

But for anchors the request's time is that of its first candidate, and its history is what happened strictly before:
events at the same second are left out, since nobody knows their order. Validation and test have one request a user:
its target by number, by column all of the last request but one, and of the last. A batch holds the history and behind
it the candidates; outcomes are called label_NAME, zeros at events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from freescale.data.batches.examples import _HELD_BACK, Examples, _spans, _tensors, _with_items
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.data.features.feature_source import schema_of
from freescale.data.pools import IndexedSource, PoolIndex, PoolRule
from freescale.data.requests.anchors import AnchorRule, find_anchors
from freescale.data.requests.token_rule import TokenRule
from freescale.data.source import Histories, IntArray, SequenceSource, SplitSource
from freescale.errors import ConfigError, DataError

_HELD_BACK_REQUESTS = {"valid": 1, "test": 0}
_BLOCK = 1 << 20
"""Events read together where requests are looked for."""


class RequestIndex(NamedTuple):
    """Every request: the row of its user, its first candidate and the end of its candidates there, and its group."""

    user: IntArray
    start: IntArray
    stop: IntArray
    groups: IntArray


class _Found(NamedTuple):
    """Events and candidates of some requests.

    Args:
        histories: where they are.
        places: there, of each request its events and behind them its candidates; None: they are all there is.
        offsets: [n + 1] where each request begins.
        counts: [n] candidates.
        first: [n] place of the first candidate.
        asked: [n] when; None without times.
        of_user: [n] whose history each is.
    """

    histories: Histories
    places: IntArray | None
    offsets: IntArray
    counts: IntArray
    first: IntArray
    asked: npt.NDArray[np.generic] | None
    of_user: IntArray


class RequestRule:
    """What requests leave to compute: n events and k candidates have n (n + 1) / 2 + k (n + 1) pairs.

    Args:
        candidates: of a request; a shorter sequence is all candidates.
        tokens: what features make of its events; one token each unless given.
    """

    def __init__(self, candidates: int, tokens: TokenRule | None = None) -> None:
        self.candidates, self._rule = candidates, tokens or TokenRule()

    def tokens(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Tokens of events and candidates."""
        events, shown = self._parts(lengths)
        return events + shown

    def pairs(self, lengths: npt.NDArray[np.integer], /) -> npt.NDArray[np.int64]:
        """Pairs of a token and one that it sees."""
        events, shown = self._parts(lengths)
        return np.asarray(events * (events + 1) // 2 + shown * (events + 1), np.int64)

    def _parts(self, lengths: npt.NDArray[np.integer]) -> tuple[IntArray, IntArray]:
        sizes = np.asarray(lengths, np.int64)
        shown = np.minimum(sizes, self.candidates)
        front = np.where(sizes > 0, self._rule.front, 0)
        return front + (sizes - shown) * (1 + self._rule.after), shown


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
            return self._of_anchors(self.anchors)
        if self.by is not None or self.window is not None:
            return self._with_groups(*self._of_split(*self._runs()))
        ends = self._ends()
        if self.split != "train":
            user = np.flatnonzero(ends > 0)
            return self._with_groups(user, ends[user] - 1, ends[user])
        counts = -(-np.maximum(ends - 1, 0) // self.candidates)
        user = np.repeat(np.arange(len(ends)), counts)
        number = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
        # From the end on, so that all but a user's first request are full.
        stop = ends[user] - (counts[user] - 1 - number) * self.candidates
        return self._with_groups(user, np.maximum(stop - self.candidates, 1), stop)

    def lengths(self) -> IntArray:
        """Tokens of every request at most: events that happened at the request's time are left out when it is read."""
        _, start, stop, _ = self.index
        return np.minimum(self._past_events, self.max_length - 1) + stop - start

    @cached_property
    def _past_events(self) -> IntArray:
        """[requests] events of a history before it is cut; of pools they are counted, reading through once."""
        user, start, _, _ = self.index
        if self.pools is None:
            return start
        if isinstance(self.source, IndexedSource):
            return self._pool_index.counts(user, start)
        known = np.zeros(len(user), np.int64)
        order = np.argsort(user, kind="stable")
        for users in self._blocks():
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
        user, start, stop, _ = self.index
        indexed = (
            isinstance(self.source, IndexedSource) and self.pools is not None and self.anchors is not None
        )
        found = (self._found_by_index if indexed else self._found)(
            user[rows], start[rows], (stop - start)[rows]
        )
        histories, index, offsets, counts, first, asked, of_user = found
        # Where candidates stand, and whose they are: what is said of them is written over what events say.
        at, _ = _spans(offsets[1:] - counts, counts)
        of = np.repeat(np.arange(len(rows)), counts)
        item = torch.from_numpy(_picked(histories.columns["item"], index).astype(np.int64))
        tokens = {"item": item, "target": item}
        if self.use_time and asked is not None:
            time = _picked(histories.columns["time"], index).astype(np.int64)
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
            tokens |= _tensors(made)
            of_users = self.features.samples(histories)
            samples |= _tensors({name: values[of_user] for name, values in of_users.items()})
            samples |= _tensors(self.features.fronts(histories, first))
        # Whose request it is: metrics group by it. A feature `user` has the ids of users.
        samples["request_user"] = torch.from_numpy(user[rows])
        batch = SequenceBatch(
            offsets=torch.from_numpy(offsets),
            tokens=tokens,
            samples=samples,
            targets=torch.from_numpy(counts),
        )
        return batch if self.features is None else _with_items(batch, self.features)

    def _found(self, user: IntArray, start: IntArray, counts: IntArray) -> _Found:
        """Events and candidates of requests, out of whole histories."""
        # A user may be asked several times in a batch, and is read once.
        who, which = np.unique(user, return_inverse=True)
        histories = self.source.read(who)
        base, events = histories.offsets[which], start
        asked = None
        if "time" in histories.columns:
            asked = histories.columns["time"][base + start]
            if self.anchors is None:
                events = _before(histories, base, events, asked)
        past, past_offsets = self._history(histories, which, events)
        if self.anchors is not None and asked is not None:
            known = np.diff(past_offsets) > 0
            asked = np.where(known, histories.columns["time"][_last(past, past_offsets)], asked)
        shown, _ = _spans(base + start, counts)
        # Candidates stand right behind the history, whatever was left out between.
        index, offsets = _joined(past, past_offsets, shown, counts)
        return _Found(histories, index, offsets, counts, base + start, asked, which)

    def _found_by_index(self, user: IntArray, start: IntArray, counts: IntArray) -> _Found:
        """The same of anchors, where a source finds single events: nothing but them is read."""
        source = self.source
        assert isinstance(source, IndexedSource)
        past, past_offsets = self._pool_index.spans(user, start, most=self.max_length - 1)
        places, offsets = _joined(past, past_offsets, source.offsets[user] + start, counts)
        histories = source.events(user, places, offsets)
        time, first = histories.columns["time"], offsets[1:] - 1
        asked = time[np.where(np.diff(past_offsets) > 0, first - 1, first)]
        return _Found(histories, None, offsets, counts, first, asked, np.arange(len(user)))

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
            return _spans(histories.offsets[which] + events - kept, kept)
        index = PoolIndex(histories.columns[self.pools.column], histories.offsets, self.pools)
        return index.spans(which, events, most=most)

    def candidate_values(self, rows: IntArray) -> dict[str, npt.NDArray[np.float32]]:
        """Outcomes of the candidates of these requests, one request behind the other."""
        user, start, stop, _ = self.index
        who, which = np.unique(user[rows], return_inverse=True)
        histories = self.source.read(who)
        index, _ = _spans(histories.offsets[which] + start[rows], (stop - start)[rows])
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

    def _ends(self) -> IntArray:
        """[users] events up to the target of the split, it included; 0 where there is none."""
        if isinstance(self.source, SplitSource):
            return self.source.ends(self.split)
        known = np.asarray(self.source.lengths) - _HELD_BACK[self.split] - 1
        return np.where(known > 0, known + 1, 0)

    def _of_anchors(self, rule: AnchorRule) -> RequestIndex:
        """One request an anchor; those of one user and day are stored together."""
        user, event = find_anchors(self.source, rule, self.split, self._blocks())
        runs = np.flatnonzero(np.append(True, user[1:] != user[:-1]))
        return RequestIndex(user, event, event + 1, np.diff(np.append(runs, len(user))))

    def _with_groups(self, user: IntArray, start: IntArray, stop: IntArray) -> RequestIndex:
        edges = np.cumsum(np.asarray(self.source.groups))
        group = np.searchsorted(edges, user, side="right")
        return RequestIndex(user, start, stop, np.bincount(group, minlength=len(edges)).astype(np.int64))

    def _runs(self) -> tuple[IntArray, IntArray, IntArray]:
        """User, first event and end of every run of equal values in a column, or of a window, some users at a time."""
        by = "time" if self.by is None else self.by
        found: list[tuple[IntArray, IntArray, IntArray]] = []
        for users in self._blocks():
            histories = self.source.read(users)
            values, count = histories.columns[by], int(histories.offsets[-1])
            values = values if self.window is None else values // self.window
            owner = np.repeat(np.arange(len(users)), histories.lengths)
            fresh = np.ones(count, bool)
            fresh[1:] = (values[1:] != values[:-1]) | (owner[1:] != owner[:-1])
            start = np.flatnonzero(fresh)
            first = histories.offsets[:-1][owner[start]]
            found.append(
                (users[owner[start]], start - first, np.append(start[1:], count)[: len(start)] - first)
            )
        none = np.zeros(0, np.int64)
        user, start, stop = (np.concatenate([none, *part]) for part in zip(*found)) if found else (none,) * 3
        return user, start, stop

    def _blocks(self) -> list[IntArray]:
        """Users whose histories are read together."""
        lengths = np.asarray(self.source.lengths)
        block = np.cumsum(lengths) // _BLOCK
        return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(block)) + 1)

    def _of_split(
        self, user: IntArray, start: IntArray, stop: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Requests are held back whole: those with the targets of a split; by itself a user's last is for the test."""
        if isinstance(self.source, SplitSource):
            ends = self.source.ends(self.split)[user]
            mine = stop <= ends if self.split == "train" else (start < ends) & (ends <= stop)
        else:
            counts = np.bincount(user, minlength=len(self.source.lengths))
            number = np.arange(len(user)) - (np.cumsum(counts) - counts)[user]
            left = counts[user] - 1 - number
            # Where there is no request before it, nothing is known of the user.
            mine = (
                left >= 2
                if self.split == "train"
                else (left == _HELD_BACK_REQUESTS[self.split]) & (number > 0)
            )
        return user[mine], start[mine], stop[mine]


def outcome_columns(source: SequenceSource) -> tuple[str, ...]:
    """Columns of events that tasks can be made of: one number an event."""
    listed = [each.name for each in schema_of(source).stored("event") if each.kind not in ("ids", "vector")]
    return tuple(dict.fromkeys([*source.features, *listed]))


def _picked(column: npt.NDArray[np.generic], index: IntArray | None) -> npt.NDArray[np.generic]:
    return column if index is None else column[index]


def _joined(
    past: IntArray, past_offsets: IntArray, shown: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    """Places of events and behind them those of candidates, request by request; and where each begins."""
    lengths = np.diff(past_offsets) + counts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    to, _ = _spans(offsets[1:] - counts, counts)
    candidate = np.zeros(int(offsets[-1]), bool)
    candidate[to] = True
    index = np.empty(len(candidate), np.int64)
    index[~candidate], index[candidate] = past, shown
    return index, offsets


def _last(places: IntArray, offsets: IntArray) -> IntArray:
    """[n] the last of each one's places; the first of all where there is none."""
    last = np.maximum(offsets[1:] - 1, 0)
    return places[last] if len(places) else np.zeros(len(last), np.int64)


def _before(
    histories: Histories, base: IntArray, events: IntArray, asked: npt.NDArray[np.generic]
) -> IntArray:
    """How many of each history's first events happened strictly before it was asked, up to the first that did not.

    Events of a log may come late, behind later ones: none that is later than the request gets into its history.
    """
    index, offsets = _spans(base, events)
    late = histories.columns["time"][index] >= np.repeat(asked, events)
    # Where the next late one stands, from each event on; behind the last there is none.
    place = np.where(late, np.arange(len(late)), len(late))
    following = np.append(np.minimum.accumulate(place[::-1])[::-1], len(late))
    found: IntArray = np.minimum(following[offsets[:-1]], offsets[1:]) - offsets[:-1]
    return found
