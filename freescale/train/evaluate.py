"""Evaluation by full ranking: each user's target against every item of the catalogue, seen items left out.

The rank of a target is a count (items with a higher score), and counts add up. So items are scored in chunks, on a
million-item catalogue as well; and with a sharded table each rank scores the items it owns for everybody's users,
and the counts are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.comm.world import Ranks
from freescale.data import Examples, IntArray, SequenceBatch
from freescale.kernels import SequenceLayout
from freescale.model import Compressor, RankingHead, Recommender, RetrievalHead, SegmentedEncoder
from freescale.train.full_ranking import Asked, ItemBlock, last_tokens, rank_of_targets
from freescale.train.item_vectors import Catalogue, ItemEncoder
from freescale.train.metrics import BinaryQuality, RankingQuality


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Everything an evaluation needs besides the split.

    Args:
        model: the dense part.
        items: where item vectors come from.
        ranks: who shares the work.
        batch: users a rank handles at once.
        item_chunk: items scored at once.
        cached: answer as serving does, in two steps through token caches; for encoders that compress histories.
    """

    model: Recommender
    items: ItemEncoder
    ranks: Ranks
    batch: int = 256
    item_chunk: int = 65_536
    cached: bool = False

    @torch.no_grad()
    def run(self, examples: Examples, *, max_users: int | None = None) -> dict[str, float | None]:
        """Metrics of one split over all ranks; every rank gets the same numbers."""
        training = self.model.training
        self.model.eval()
        try:
            if isinstance(self.model.head, RankingHead):
                return self._run_ranking(self.model.head, examples, max_users)
            assert isinstance(self.model.head, RetrievalHead)
            return self._run_retrieval(self.model.head, examples, max_users)
        finally:
            self.model.train(training)

    def _run_retrieval(
        self, head: RetrievalHead, examples: Examples, max_users: int | None
    ) -> dict[str, float | None]:
        catalog = examples.source.items.ids
        vectors = self._catalogue(examples)
        blocks = [ItemBlock(numbers=n, vectors=head.vectors(v)) for n, v in vectors.parts()]
        sharded = vectors.spread and self.ranks.num_ranks > 1
        quality = RankingQuality()
        for rows, batch in self._batches(examples, max_users):
            states = head.vectors(self._last_states(batch, vectors))
            asked = Asked.of(examples, rows, batch, catalog, states, self.ranks.device)
            everybody = asked.gather(self.ranks) if sharded else asked
            counts = rank_of_targets(everybody, blocks, self.ranks if sharded else None)
            mine = everybody.own_part(self.ranks.rank) if sharded else slice(None)
            quality.update(counts[mine])
        self.ranks.sum_on_cpu(quality.sums)
        return dict(quality.values())

    def _run_ranking(
        self, head: RankingHead, examples: Examples, max_users: int | None
    ) -> dict[str, float | None]:
        tasks = [BinaryQuality() for _ in head.thresholds]
        vectors = self._catalogue(examples)
        for _, batch in self._batches(examples, max_users):
            last = last_tokens(batch).to(self.ranks.device)
            lookup, slotted = vectors.look_up(batch)
            layout = SequenceLayout(slotted.offsets, device=self.ranks.device)
            states = self.model.states(lookup, slotted, layout).index_select(0, last)
            items = lookup.index_select(0, slotted.tokens["target_slot"].index_select(0, last))
            logits, labels = head.logits(states, items), head.labels(slotted).index_select(0, last)
            for n, task in enumerate(tasks):
                task.update(logits[:, n], labels[:, n])
        values: dict[str, float | None] = {}
        for n, task in enumerate(tasks):
            self.ranks.sum_on_cpu(task.sums)
            values |= {name if n == 0 else f"{name}/{n}": value for name, value in task.values().items()}
        return values

    def _batches(self, examples: Examples, max_users: int | None) -> Iterator[tuple[IntArray, SequenceBatch]]:
        """This rank's users; every rank gets the same number of batches, so that collectives match."""
        users = np.flatnonzero(examples.lengths() > 0)[:max_users]
        per_round = self.batch * self.ranks.num_ranks
        for start in range(0, len(users), per_round):
            rows = users[start : start + per_round][self.ranks.rank :: self.ranks.num_ranks]
            yield rows, examples.batch(rows)

    def _catalogue(self, examples: Examples) -> Catalogue:
        """The vectors of all items, made once for the whole evaluation."""
        return self.items.catalogue(examples.source.items.ids, chunk=self.item_chunk)

    def _last_states(self, batch: SequenceBatch, vectors: Catalogue) -> Tensor:
        rows, slotted = vectors.look_up(batch)
        encoder = self.model.encoder
        if self.cached and isinstance(encoder, SegmentedEncoder) and len(batch):
            compressor = Compressor(encoder, model="", dtype=rows.dtype)
            return compressor.last_states(F.embedding(slotted.tokens["item_slot"], rows), slotted)
        layout = SequenceLayout(slotted.offsets, device=self.ranks.device)
        return self.model.states(rows, slotted, layout).index_select(0, last_tokens(batch).to(rows.device))


def popularity_quality(
    examples: Examples, *, batch: int = 4096, max_users: int | None = None
) -> dict[str, float]:
    """Metrics of recommending the most frequent unseen items of the training part to everybody.

    All users share one order of the items. So the rank of a target is its place in that order, less the seen items that
    stand before it: the work grows with the events, not with users times items.
    """
    catalog = examples.source.items
    place = np.empty(len(catalog.ids), dtype=np.int64)
    place[np.argsort(-catalog.train_counts, kind="stable")] = np.arange(len(place))
    users = np.flatnonzero(examples.lengths() > 0)[:max_users]
    quality = RankingQuality()
    for start in range(0, len(users), batch):
        rows = users[start : start + batch]
        no_vectors = torch.empty(len(rows), 0)
        asked = Asked.of(examples, rows, examples.batch(rows), catalog.ids, no_vectors, torch.device("cpu"))
        target = place[asked.target.numpy()]
        # Histories may hold an item twice; it stands before the target once.
        seen = np.unique(asked.seen_user.numpy() * len(place) + place[asked.seen.numpy()])
        user, seen_place = np.divmod(seen, len(place))
        before = np.bincount(user[seen_place < target[user]], minlength=len(rows))
        quality.update(torch.from_numpy(target - before))
    return quality.values()
