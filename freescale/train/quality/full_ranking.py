"""The rank of each user's target among all items, as a count that chunks and ranks can add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.comm.world import Ranks
from freescale.data import Examples, IntArray, SequenceBatch


@dataclass(frozen=True)
class ItemBlock:
    """Some candidates: their numbers in the catalogue, ascending, and their vectors."""

    numbers: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class Asked:
    """Users to rank for: their vectors, the numbers of their targets and of the items they have seen.

    Args:
        vectors: [U, D] one a user.
        target: [U] catalogue number.
        seen_user: [S] which user saw an item.
        seen: [S] which item (catalogue number).
        sizes: users of each rank, after a gather.
    """

    vectors: Tensor
    target: Tensor
    seen_user: Tensor
    seen: Tensor
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of(
        examples: Examples,
        rows: IntArray,
        batch: SequenceBatch,
        catalog: IntArray,
        vectors: Tensor,
        device: torch.device,
    ) -> Asked:
        """The question for one batch of users."""
        offsets, seen = examples.seen(rows)
        target = batch.tokens["target"].cpu().index_select(0, last_tokens(batch)).numpy()
        user = np.repeat(np.arange(len(rows)), np.diff(offsets))
        places = [np.searchsorted(catalog, target), user, np.searchsorted(catalog, seen)]
        target_number, seen_user, seen_number = (torch.from_numpy(x).to(device) for x in places)
        return Asked(vectors, target_number, seen_user, seen_number)

    def gather(self, ranks: Ranks) -> Asked:
        """Everybody's users on every rank."""
        vectors, sizes = gather_uneven(self.vectors, ranks)
        target, _ = gather_uneven(self.target, ranks)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        seen_user, _ = gather_uneven(self.seen_user + int(starts[ranks.rank]), ranks)
        seen, _ = gather_uneven(self.seen, ranks)
        return Asked(vectors, target, seen_user, seen, tuple(sizes))

    def own_part(self, rank: int) -> slice:
        """Where this rank's users stand after a gather."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


class Blocks(Protocol):
    """Blocks that can be gone through again and again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ItemBlock]: ...


def rank_of_targets(asked: Asked, blocks: Blocks, ranks: Ranks | None = None) -> Tensor:
    """[U] how many candidates stand before each user's target; ties go to the item with the smaller number.

    Args:
        asked: the users.
        blocks: the candidates held here.
        ranks: given when other ranks hold other candidates.
    """
    device = asked.vectors.device
    users = torch.arange(len(asked.target), device=device)
    target_score = torch.zeros(len(users), dtype=asked.vectors.dtype, device=device)
    # The target's score must come from the same product as the others', or rounding would break ties at random.
    kept = _scores(asked, next(iter(blocks))) if len(blocks) == 1 else None
    for block in _filled(blocks):
        scores = kept if kept is not None else _scores(asked, block)
        column, inside = _find(block.numbers, asked.target)
        target_score += torch.where(inside, scores[users, column], 0.0)
    if ranks is not None:
        ranks.sum(target_score)
    counts = torch.zeros(len(users), dtype=torch.int64, device=device)
    for block in _filled(blocks):
        scores = kept if kept is not None else _scores(asked, block)
        counts += _count_ahead(scores, target_score, block, asked, users)
    if ranks is not None:
        ranks.sum(counts)
    return counts


def _filled(blocks: Blocks) -> Iterator[ItemBlock]:
    """A rank whose rows are no items of the catalogue holds none."""
    return (block for block in blocks if len(block.numbers))


def _count_ahead(
    scores: Tensor, target_score: Tensor, block: ItemBlock, asked: Asked, users: Tensor
) -> Tensor:
    bar = target_score[:, None]
    # "not below" instead of "above", so that a NaN counts against the model and never for it.
    ahead = ~(scores < bar)
    ahead &= (scores != bar) | (block.numbers[None, :] < asked.target[:, None])
    column, inside = _find(block.numbers, asked.seen)
    ahead[asked.seen_user[inside], column[inside]] = False
    column, inside = _find(block.numbers, asked.target)
    ahead[users[inside], column[inside]] = False
    return ahead.sum(1)


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


def _find(numbers: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each wanted number in ascending `numbers`, and whether it is there."""
    column = torch.searchsorted(numbers, wanted).clamp(max=len(numbers) - 1)
    return column, numbers[column] == wanted


def last_tokens(batch: SequenceBatch) -> Tensor:
    """[B] place of each sequence's last token."""
    return batch.offsets[1:] - 1
