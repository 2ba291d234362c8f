"""Evaluation: what a head measures itself, and full ranking where it can score a catalogue.

Full ranking holds each user's target against every item of the catalogue, by the rule that serving follows: where seen
items are filtered, a target that was seen is a miss.

The rank of a target is a count (items with a higher score), and counts add up. So items are scored in chunks, on a
million-item catalogue as well; and with a sharded table each rank scores the items it owns for everybody's users,
and the counts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from freescale.comm.world import Ranks
from freescale.data import Examples, IntArray, SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.kernels.runtime import Readback, on_device
from freescale.model import (
    CUTOFFS,
    NEVER,
    Compressor,
    HeadMetrics,
    LastEvents,
    MergedMetrics,
    RankingQuality,
    Recommender,
    RequestMetrics,
    RetrievingHead,
    compresses,
    own_metrics,
    retrieves,
)
from freescale.train.item_vectors import BatchItems, Catalogue, ItemEncoder
from freescale.train.quality.eval_batches import EvalBatch, EvalBatches
from freescale.train.quality.full_ranking import (
    FULL,
    AskedNumbers,
    AskedOfDevice,
    ItemBlock,
    Rule,
    last_tokens,
    rank_of_targets,
)

GiveUp = Callable[[], bool]
"""Whether to leave an evaluation unfinished; asked now and then, by every rank at the same moment."""

_ASK_EVERY = 16

_USERS, _MOST_USERS, _ENOUGH_TOKENS, _ENOUGH_SCORES = 256, 1024, 1 << 17, 1 << 24
"""Handled at once by a rank; and by all GPUs, as fewer short histories take a host longer than a GPU."""


class GivenUpError(Exception):
    """An evaluation was left unfinished, on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Everything an evaluation needs besides the split.

    Args:
        model: the dense part.
        items: where item vectors come from.
        ranks: who shares the work.
        rule: among what targets are ranked.
        cutoffs: where lists are cut.
        batch: users a rank handles at once; None: 256, and on a GPU more where their histories are short.
        item_chunk: items scored at once.
        cached: answer as serving does, in two steps through token caches; for encoders that compress histories.
    """

    model: Recommender
    items: ItemEncoder
    ranks: Ranks
    rule: Rule = FULL
    cutoffs: tuple[int, ...] = CUTOFFS
    batch: int | None = None
    item_chunk: int = 65_536
    cached: bool = False
    # Not of `init`: one that is made out of this one, by another rule, makes its own.
    _batches: EvalBatches = field(default_factory=EvalBatches, init=False, repr=False, compare=False)

    @torch.no_grad()
    def run(
        self, examples: Examples, *, max_users: int | None = None, give_up: GiveUp = lambda: False
    ) -> dict[str, float | None]:
        """Metrics of one split over all ranks; every rank gets the same numbers, or GivenUpError."""
        training = self.model.training
        self.model.eval()
        try:
            return self._run(examples, max_users, give_up)
        finally:
            self.model.train(training)

    def _run(self, examples: Examples, max_users: int | None, give_up: GiveUp) -> dict[str, float | None]:
        """Full ranking, where the head can rank a catalogue, and what the head measures itself."""
        head = self.model.head
        vectors = self._catalogue(examples)
        ranking = None
        if retrieves(head):
            ranking = _FullRanking(head, vectors, self)
        own = own_metrics(head)
        if ranking is None and own is None:
            raise ConfigError(
                "this head cannot be judged",
                got=type(head).__name__,
                allowed="queries(states) and candidates(rows), or metrics()",
            )
        users, missed = asked_users(examples, max_users)
        if ranking is not None and self.ranks.is_first:
            ranking.quality.update(torch.full((missed,), NEVER))
        make = partial(self._made, examples, vectors, ranks_targets=ranking is not None)
        wide = self.ranks.device.type == "cuda" and not isinstance(own, RequestMetrics)
        parts = self._parts(
            users, self._at_once(examples, users, ranks_targets=ranking is not None, wide=wide)
        )
        for n, one in enumerate(self._batches.of(examples, parts, make)):
            if n % _ASK_EVERY == 0 and give_up():
                raise GivenUpError
            found = vectors.look_up(one.batch, one.found)
            if one.batch.targets is not None:
                self._add_requests(own, found)
                continue
            states = self._last_states(found)
            places = None if one.asked is None or ranking is None else ranking.add(one.asked, states)
            if own is not None:
                own.update(_last_events(found.rows, found.batch, states, places))
        values: dict[str, float | None] = {}
        if ranking is not None:
            ranking.finish()
            values |= self._summed(ranking.quality)
        if own is not None:
            values = _joined(values, self._summed(own))
        return values

    def _add_requests(self, own: object, found: BatchItems) -> None:
        """Candidates of requests, for the metrics of a head that knows them."""
        if not isinstance(own, RequestMetrics):
            raise ConfigError(
                "this head cannot judge requests",
                got=type(self.model.head).__name__,
                allowed="metrics with update_requests(states, rows, batch)",
            )
        rows, batch = found.rows, found.batch
        layout = SequenceLayout(batch.offsets, device=self.ranks.device)
        own.update_requests(self.model.states(rows, batch, layout, found.tables), rows, batch)

    def _summed(self, metrics: HeadMetrics | MergedMetrics | RankingQuality) -> Mapping[str, float | None]:
        if isinstance(metrics, MergedMetrics):
            metrics.merge(AllRanks(self.ranks))
            return metrics.values()
        # Row by row: in which order ranks are added depends on where in a tensor a number stands.
        sums = metrics.sums
        for row in sums if sums.ndim > 1 else [sums]:
            self.ranks.sum_on_cpu(row)
        return metrics.values()

    def _at_once(self, examples: Examples, users: IntArray, *, ranks_targets: bool, wide: bool) -> int:
        """Users of a batch; `wide`: more of them where they are short and it was left open."""
        if self.batch is not None or not wide:
            return self.batch or _USERS
        scored = min(self.item_chunk, len(examples.source.items.ids)) if ranks_targets else 1
        return users_at_once(examples.lengths()[users], scored=scored, num_ranks=self.ranks.num_ranks)

    def _parts(self, users: IntArray, at_once: int) -> list[IntArray]:
        """This rank's users; every rank gets the same number of batches, so that collectives match."""
        per_round = at_once * self.ranks.num_ranks
        rounds = (users[start : start + per_round] for start in range(0, len(users), per_round))
        return [part[self.ranks.rank :: self.ranks.num_ranks] for part in rounds]

    def _made(
        self, examples: Examples, vectors: Catalogue, rows: IntArray, *, ranks_targets: bool
    ) -> EvalBatch:
        batch, asked = examples.batch(rows), None
        if ranks_targets and batch.targets is None:
            asked = AskedNumbers.of(examples, rows, batch, self.rule).on(self.ranks.device)
        if self.ranks.device.type == "cuda":
            batch = batch.pin()  # nobody waits for its copies
        found = vectors.find(batch)
        return EvalBatch(rows, batch if found is None else found.batch, asked, found)

    def _catalogue(self, examples: Examples) -> Catalogue:
        """The vectors of all items, made once for the whole evaluation."""
        return self.items.catalogue(examples.source.items.ids, chunk=self.item_chunk)

    def _last_states(self, items: BatchItems) -> Tensor:
        encoder, rows, indexed = self.model.encoder, items.rows, items.batch
        if self.cached and compresses(encoder) and len(indexed):
            compressor = Compressor(encoder, model="", dtype=rows.dtype)
            return compressor.last_states(self.model.vectors(rows, indexed, items.tables), indexed)
        layout = SequenceLayout(indexed.offsets, device=self.ranks.device)
        last = on_device(last_tokens(indexed), rows.device)
        return self.model.states(rows, indexed, layout, items.tables).index_select(0, last)


class AllRanks:
    """What metrics need of the other ranks.

    Args:
        ranks: who takes part.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks; on the CPU."""
        return self._ranks.sum_on_cpu(values)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one after the other; a rank may have any number of them."""
        ranks = self._ranks
        if ranks.group is None:
            return rows
        counts = torch.cat(ranks.gather(torch.tensor([len(rows)], device=ranks.device))).tolist()
        # One shape for all: what is too long is cut off again.
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = ranks.gather(padded.to(ranks.device))
        return torch.cat([part[:count].cpu() for part, count in zip(parts, counts)])


class _FullRanking:
    """The place of every user's target among all items.

    Args:
        head: makes states and items comparable.
        vectors: of all items, or of those held here.
        how: who shares the work.
    """

    def __init__(self, head: RetrievingHead, vectors: Catalogue, how: Evaluator) -> None:
        self._head, self._ranks = head, how.ranks
        self._blocks = _Candidates(head, vectors)
        self._sharded = vectors.spread and how.ranks.num_ranks > 1
        self._places: Readback | None = None
        self.quality = RankingQuality(how.cutoffs)

    def add(self, numbers: AskedOfDevice, states: Tensor) -> Tensor:
        """[B] how many items stand before the targets of this rank's users; every rank must call it."""
        ranks = self._ranks
        asked = numbers.by(self._head.queries(states))
        everybody = asked.gather(ranks) if self._sharded else asked
        counts = rank_of_targets(everybody, self._blocks, ranks if self._sharded else None)
        mine = counts[everybody.own_part(ranks.rank) if self._sharded else slice(None)]
        places = Readback(mine)
        self.finish()  # those of a batch are read when the next one is queued
        self._places = places
        return mine

    def finish(self) -> None:
        """Count the users of the batch before, if there was one."""
        if self._places is not None:
            self.quality.update(self._places.read())
            self._places = None


class _Candidates:
    """The items held here, in blocks that are made anew whenever they are gone through.

    Kept, they would be a second copy of this rank's part of the table. One block alone is kept: it is no larger than a
    chunk.

    Args:
        head: makes items comparable.
        vectors: of the items.
    """

    def __init__(self, head: RetrievingHead, vectors: Catalogue) -> None:
        self._head, self._vectors = head, vectors
        self._num = sum(1 for _ in vectors.parts())
        self._kept = list(self._made()) if self._num == 1 else None

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[ItemBlock]:
        return self._made() if self._kept is None else iter(self._kept)

    def _made(self) -> Iterator[ItemBlock]:
        for numbers, vectors in self._vectors.parts():
            yield ItemBlock(numbers=numbers, vectors=self._head.candidates(vectors))


def _last_events(
    lookup: Tensor, indexed: SequenceBatch, states: Tensor, target_rank: Tensor | None
) -> LastEvents:
    """What the head's own metrics see of a batch."""
    last = on_device(last_tokens(indexed), lookup.device)
    tokens = {name: values.index_select(0, last) for name, values in indexed.tokens.items()}
    return LastEvents(
        states=states,
        items=lookup.index_select(0, tokens["target_index"]),
        tokens=tokens,
        samples=indexed.samples,
        target_rank=target_rank,
    )


def _joined(ranking: Mapping[str, float | None], own: Mapping[str, float | None]) -> dict[str, float | None]:
    """Both, each name once."""
    twice = sorted({*ranking} & {*own})
    if twice:
        raise ConfigError(
            "a head's own metric is called like one of full ranking",
            got=", ".join(twice),
            next_step="give it another name",
        )
    return {**ranking, **own}


def users_at_once(lengths: IntArray, *, scored: int, num_ranks: int) -> int:
    """How many users with histories like these keep each of so many GPUs busy, each held against `scored` items."""
    mean = float(lengths.mean()) if len(lengths) else 0.0
    # Where items are spread over the ranks, each holds everybody's users against its own.
    most = min(
        _MOST_USERS // num_ranks, int(_ENOUGH_TOKENS / max(1.0, mean)), _ENOUGH_SCORES // max(1, scored)
    )
    return max(_USERS, most)


def asked_users(examples: Examples, max_users: int | None = None) -> tuple[IntArray, int]:
    """The rows to evaluate, the first so many, and how many more are misses: nothing was learnt of their targets."""
    missed = examples.missed()
    users = np.flatnonzero((examples.lengths() > 0) | missed)[:max_users]
    return users[~missed[users]], int(missed[users].sum())
