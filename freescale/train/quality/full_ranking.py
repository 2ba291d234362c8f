"""The rank of each user's target among all items, as a count that chunks and ranks can add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.comm.world import Ranks
from freescale.data import Examples, IntArray, SequenceBatch, draw_negatives
from freescale.kernels.rows import find_sorted
from freescale.kernels.runtime import to_device
from freescale.model import NEVER

_EVALUATION = 1 << 62
"""A step that no training reaches: evaluation draws items of its own."""


@dataclass(frozen=True)
class ItemBlock:
    """Some candidates: their numbers in the catalogue, ascending, and their vectors."""

    numbers: Tensor
    vectors: Tensor


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Among what a target is ranked; serving follows the same rule.

    Args:
        filter_seen: items of the history are not recommended; a target among them is a miss.
        sampled: rank among this many random items instead of all.
        seed: of these.
    """

    filter_seen: bool = True
    sampled: int | None = None
    seed: int = 0


FULL = Rule()
"""Every item, seen ones filtered."""


@dataclass(frozen=True)
class Pairs:
    """Users and items: which user, and which item by its number in the catalogue."""

    user: Tensor
    item: Tensor

    def gather(self, ranks: Ranks, first_user: int) -> Pairs:
        """Those of all ranks; the users of this one come after `first_user` others."""
        user, _ = gather_uneven(self.user + first_user, ranks)
        return Pairs(user, gather_uneven(self.item, ranks)[0])


class AskedNumbers(NamedTuple):
    """What is asked for a batch of users, by numbers alone: no model and no device is needed to make it.

    Args:
        target: [U] catalogue number.
        hidden: (user, item) pairs that are left out.
        among: such pairs that are ranked, besides the target; None: everything.
    """

    target: IntArray
    hidden: tuple[IntArray, IntArray]
    among: tuple[IntArray, IntArray] | None = None

    @staticmethod
    def of(examples: Examples, rows: IntArray, batch: SequenceBatch, rule: Rule) -> AskedNumbers:
        """Of one batch of users."""
        catalog = examples.source.items.ids
        user = item = np.zeros(0, dtype=np.int64)
        if rule.filter_seen:
            offsets, seen = examples.seen(rows)
            user, item = np.repeat(np.arange(len(rows)), np.diff(offsets)), np.searchsorted(catalog, seen)
        targets = batch.tokens["target"].cpu().index_select(0, last_tokens(batch)).numpy()
        target = np.searchsorted(catalog, targets)
        among = None
        if rule.sampled is not None:
            among = _draw(rows, target, user * len(catalog) + item, num_items=len(catalog), rule=rule)
        return AskedNumbers(target, (user, item), among)

    def on(self, device: torch.device) -> AskedOfDevice:
        """By one copy to the device, which nobody waits for."""
        target, *pairs = to_device(self.target, *self.hidden, *(self.among or ()), device=device)
        among = Pairs(*pairs[2:]) if self.among is not None else None
        return AskedOfDevice(target, Pairs(*pairs[:2]), among)


class AskedOfDevice(NamedTuple):
    """The same where the ranking is done."""

    target: Tensor
    hidden: Pairs
    among: Pairs | None = None

    @property
    def nbytes(self) -> int:
        """What it takes to keep it."""
        pairs = [self.hidden] if self.among is None else [self.hidden, self.among]
        return self.target.nbytes + sum(each.user.nbytes + each.item.nbytes for each in pairs)

    def by(self, vectors: Tensor) -> Asked:
        """Asked by these vectors of the users."""
        return Asked(vectors, self.target, self.hidden, self.among)


@dataclass(frozen=True)
class Asked:
    """Users to rank for: their vectors, the numbers of their targets and of the items they are not recommended.

    Args:
        vectors: [U, D] one a user.
        target: [U] catalogue number.
        hidden: what is left out: items a user has seen.
        among: what is ranked, besides the target; None: everything.
        sizes: users of each rank, after a gather.
    """

    vectors: Tensor
    target: Tensor
    hidden: Pairs
    among: Pairs | None = None
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of(
        examples: Examples,
        rows: IntArray,
        batch: SequenceBatch,
        vectors: Tensor,
        device: torch.device,
        rule: Rule,
    ) -> Asked:
        """The question for one batch of users."""
        return AskedNumbers.of(examples, rows, batch, rule).on(device).by(vectors)

    @property
    def never(self) -> Tensor:
        """[U] whether the target itself is left out, so that it is not recommended at all."""
        user = self.hidden.user
        found = torch.zeros(len(self.target) + 1, dtype=torch.bool, device=self.target.device)
        hit = torch.where(self.hidden.item == self.target[user], user, len(self.target))
        _put(found, (hit,), value=True)
        return found[:-1]

    def gather(self, ranks: Ranks) -> Asked:
        """Everybody's users on every rank."""
        vectors, sizes = gather_uneven(self.vectors, ranks)
        target, _ = gather_uneven(self.target, ranks)
        first = sum(sizes[: ranks.rank])
        among = None if self.among is None else self.among.gather(ranks, first)
        return Asked(vectors, target, self.hidden.gather(ranks, first), among, tuple(sizes))

    def own_part(self, rank: int) -> slice:
        """Where this rank's users stand after a gather."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def _draw(
    rows: IntArray, target: IntArray, hidden: IntArray, *, num_items: int, rule: Rule
) -> tuple[IntArray, IntArray]:
    """(user, item) of the items to rank among: distinct, not hidden, not the target; a function of seed and row."""
    wanted = rule.sampled or 0
    drawn = draw_negatives(
        rows, num_negatives=4 * wanted, num_items=num_items, seed=rule.seed, step=_EVALUATION
    )
    user = np.repeat(np.arange(len(rows)), 4 * wanted)
    keys = user * num_items + drawn.reshape(-1)
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    fits = (first & ~np.isin(keys, hidden) & (drawn.reshape(-1) != target[user])).reshape(len(rows), -1)
    chosen = (fits & (fits.cumsum(1) <= wanted)).reshape(-1)
    return user[chosen], drawn.reshape(-1)[chosen]


class Blocks(Protocol):
    """Blocks that can be gone through again and again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ItemBlock]: ...


def rank_of_targets(asked: Asked, blocks: Blocks, ranks: Ranks | None = None) -> Tensor:
    """[U] how many candidates stand before each user's target, `NEVER` where it is hidden or no candidate itself.

    Ties go to the item with the smaller number.

    Args:
        asked: the users.
        blocks: the candidates held here.
        ranks: given when other ranks hold other candidates.
    """
    device = asked.vectors.device
    users = torch.arange(len(asked.target), device=device)
    target_score = torch.zeros(len(users), dtype=asked.vectors.dtype, device=device)
    found = torch.zeros(len(users), dtype=torch.int64, device=device)
    # The target's score must come from the same product as the others', or rounding would break ties at random.
    kept = _scores(asked, next(iter(blocks))) if len(blocks) == 1 else None
    for block in _filled(blocks):
        scores = kept if kept is not None else _scores(asked, block)
        column, inside = find_sorted(block.numbers, asked.target)
        target_score += torch.where(inside, scores[users, column], 0.0)
        found += inside
    if ranks is not None:
        ranks.sum(target_score)
        ranks.sum(found)
    counts = torch.zeros(len(users), dtype=torch.int64, device=device)
    for block in _filled(blocks):
        scores = kept if kept is not None else _scores(asked, block)
        counts += _count_ahead(scores, target_score, block, asked, users)
    if ranks is not None:
        ranks.sum(counts)
    return torch.where(asked.never | (found == 0), NEVER, counts)


def _filled(blocks: Blocks) -> Iterator[ItemBlock]:
    """A rank whose rows are no items of the catalogue holds none."""
    return (block for block in blocks if len(block.numbers))


def _count_ahead(
    scores: Tensor, target_score: Tensor, block: ItemBlock, asked: Asked, users: Tensor
) -> Tensor:
    bar, last = target_score[:, None], len(users)
    # A row more takes what falls into no column of the block: how much that is, no host has to know.
    marks = torch.empty(last + 1, scores.shape[1], dtype=torch.bool, device=scores.device)
    ahead = marks[:last]
    # "not below" instead of "above", so that a NaN counts against the model and never for it.
    torch.lt(scores, bar, out=ahead).logical_not_()
    ahead &= (scores != bar) | (block.numbers[None, :] < asked.target[:, None])
    if asked.among is not None:
        among = torch.zeros_like(marks)
        _mark(among, asked.among, block, value=True)
        ahead &= among[:last]
    _mark(marks, asked.hidden, block, value=False)
    _mark(marks, Pairs(users, asked.target), block, value=False)
    return ahead.sum(1)


def _mark(marks: Tensor, pairs: Pairs, block: ItemBlock, *, value: bool) -> None:
    """[U + 1, items of the block] where a pair stands; pairs of other items into the last row."""
    column, inside = find_sorted(block.numbers, pairs.item)
    _put(marks, (torch.where(inside, pairs.user, len(marks) - 1), column), value=value)


def _put(marks: Tensor, where: tuple[Tensor, ...], *, value: bool) -> None:
    """As by assignment, which brings its value to a GPU and waits for that."""
    marks.index_put_(where, torch.full((), value, dtype=marks.dtype, device=marks.device))


def gather_uneven(values: Tensor, ranks: Ranks) -> tuple[Tensor, list[int]]:
    """The values of all ranks one after the other, and how many came from each."""
    sizes = torch.zeros(ranks.num_ranks, dtype=torch.int64, device=values.device)
    sizes[ranks.rank] = len(values)
    counts = ranks.sum(sizes).tolist()
    padded = values.new_zeros(max(counts), *values.shape[1:])
    padded[: len(values)] = values
    return torch.cat([part[:count] for part, count in zip(ranks.gather(padded), counts)]), counts


def _scores(asked: Asked, block: ItemBlock) -> Tensor:
    return asked.vectors @ block.vectors.T.to(asked.vectors.dtype)


def last_tokens(batch: SequenceBatch) -> Tensor:
    """[B] place of each sequence's last token."""
    return batch.offsets[1:] - 1
