"""The few sizes that the batches of a run are padded to, foreseen from its plan before the first step.

Every size is a recording of its own, and a step whose size is not recorded takes ten times as long as one that is
replayed; on several ranks all others wait for it. So sizes are few, and known at the start: its first steps
are planned as they will come, short last ones of epochs among them, and their tokens covered by as few sizes as pay.
Sequences, rows and items have one size.

    tokens of 32 steps   ··:·::::·:··           sizes   |    |     |        (the last one for what may still come)

A batch takes the smallest size that holds it; what none holds is padded by coarse steps of its own. All of it follows
from seed, data and recipe: never from what has been recorded yet, since a product of another size may round otherwise.

Pads of large batches cost time that no replay wins back, so their sizes lie closer together. And lists with room for
any lengths of so many tokens would be too long: they have room for as many pairs of tokens as kernels keep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from freescale.balance import BalancedSampler, StepPlan
from freescale.data import IntArray, SequenceBatch, TokenRule
from freescale.jagged import offsets_of
from freescale.kernels import LayoutRoom
from freescale.kernels.attention import BIAS_ROWS, is_long, pair_blocks
from freescale.pipeline.padding.source import FEWEST, longer_room, padded_size

_LARGE = 32_768
"""Tokens from which on pads cost more than the host does."""


class _Grain(NamedTuple):
    """How closely sizes follow batches.

    Args:
        looked_at: steps that tell what others will be like.
        steps: sizes lie such a part apart.
        price: a further size must save at least such a part of all tokens, pads included: it is recorded, and kept.
    """

    looked_at: int
    steps: int
    price: int


SMALL_BATCHES, LARGE_BATCHES = _Grain(32, 16, 128), _Grain(64, 64, 1024)

MOST_SIZES = 20
"""More would not all be recorded (`train/compute/recordings.py`)."""

_NEARLY_ALL = 0.9
"""Of all batches; where fewer can be replayed, pads of the others cost more than that saves."""

_COARSE = 4
"""Unforeseen sizes lie 1/4 apart: they are rare, and should meet again."""


class RowCounts(NamedTuple):
    """What a batch asks for.

    Args:
        rows: unique rows, by table.
        items: distinct items, where the batch says something of each.
    """

    rows: Mapping[str, int]
    items: int = 0


class PaddingSizes(NamedTuple):
    """Sizes to pad to; without any all are 1/16 apart.

    Args:
        tokens: ascending.
        samples: places for sequences.
        rows: by table, places for unique rows, and one for pads.
        items: places for distinct items, and one for pads.
        blocks: pairs of blocks of tokens (`LayoutRoom`); 0: as many as may be among so many tokens.
        long: whether most batches have long sequences (`LayoutRoom`).
    """

    tokens: tuple[int, ...] = ()
    samples: int = 0
    rows: Mapping[str, int] = MappingProxyType({})
    items: int = 0
    blocks: int = 0
    long: bool = False

    def holds(
        self, *, tokens: int, samples: int, rows: Mapping[str, int], items: int = 0, blocks: int = 0
    ) -> bool:
        """Whether such a size is one of these."""
        fixed = (samples, items, blocks) == (self.samples, self.items, self.blocks)
        return tokens in self.tokens and fixed and dict(rows) == dict(self.rows)

    def tokens_for(self, num: int) -> int:
        """Places for so many tokens."""
        if not self.tokens:
            return padded_size(num)
        at = bisect_left(self.tokens, num)
        return self.tokens[at] if at < len(self.tokens) else padded_size(num, steps=_COARSE)

    def samples_for(self, num: int) -> int:
        """Places for so many sequences."""
        if num <= self.samples:
            return self.samples
        return padded_size(num, fewest=8, steps=_COARSE if self.samples else 16)

    def room_for(self, lengths: IntArray, *, longest: int, rule: TokenRule | None = None) -> LayoutRoom:
        """The room of such sequences, none of which may be longer than `longest`; the rule says how they grow."""
        blocks = max(self.blocks, pair_blocks(lengths)) if self.blocks else 0
        long = self.long if self.tokens else is_long(_grown(lengths, rule))
        return LayoutRoom(self.tokens_for(int(lengths.sum())), longest, blocks, long)

    def rows_for(self, table: str, num: int, *, table_rows: int) -> int:
        """Places for so many unique rows of a table, and one for pads."""
        return _places(num, foreseen=self.rows.get(table, 0), most=table_rows)

    def items_for(self, num: int, *, num_items: int) -> int:
        """Places for so many distinct items of a catalogue, and one for pads."""
        return _places(num, foreseen=self.items, most=num_items)


def _places(num: int, *, foreseen: int, most: int) -> int:
    """Places for so many, and one for pads: what was foreseen, all of a small table, else one of few sizes."""
    if num < foreseen:
        return foreseen
    if 2 * most <= 3 * num or most < FEWEST:
        return most + 1
    return min(most + 1, padded_size(num + 1, steps=_COARSE))


UNFORESEEN = PaddingSizes()
"""Of batches that nobody has planned."""


class PairLimit(NamedTuple):
    """What a rank can keep of the pairs of tokens of a batch.

    Args:
        most: pairs of blocks of tokens; None: any number.
        longest: tokens of the longest sequence there may be.
        rule: how sequences grow by tokens of features; None: they do not.
    """

    most: int | None = None
    longest: int = 0
    rule: TokenRule | None = None

    def hold(self, *, tokens: int, samples: int, blocks: int = 0) -> bool:
        """Whether all that may come in such a room can be kept."""
        if self.most is None:
            return True
        room = LayoutRoom(tokens, self.longest, blocks)
        if self.rule is not None:
            room = longer_room(room, samples, self.rule)
        return room.pairs(samples, BIAS_ROWS) <= self.most

    def largest(self, *, tokens: int, samples: int) -> int:
        """The most pairs of blocks that a room may have whose pairs can be kept; 0: not one."""
        assert self.most is not None, "any number"
        if self.rule is None:
            return self.most
        grown = (1 + self.rule.after) ** 2
        rest = longer_room(LayoutRoom(tokens, self.longest, 1), samples, self.rule).blocks - grown
        return max(0, (self.most - rest) // grown)


ANY_PAIRS = PairLimit()


def foresee_sizes(
    sampler: BalancedSampler,
    *,
    rows_of: Callable[[StepPlan], RowCounts],
    table_rows: Mapping[str, int],
    num_items: int = 0,
    num_parts: int = 1,
    pairs: PairLimit = ANY_PAIRS,
) -> PaddingSizes | None:
    """The sizes of this rank's batches; None where too many of them have more pairs than they may have.

    Args:
        sampler: plans the run.
        rows_of: what a planned batch asks for; asked for few of them, for they have to be read.
        table_rows: of every table; no batch has more.
        num_items: of the catalogue, where batches say something of items.
        num_parts: micro-batches a step.
        pairs: what bounds the pairs of tokens of a batch.
    """
    plans = [sampler.plan(step) for step in range(SMALL_BATCHES.looked_at)]
    lengths = [sampler.batches.lengths_of(plan.rows) for plan in plans]
    if max(int(each.sum()) for each in lengths) >= _LARGE * num_parts:
        plans += [sampler.plan(step) for step in range(len(plans), LARGE_BATCHES.looked_at)]
        lengths += [sampler.batches.lengths_of(plan.rows) for plan in plans[len(lengths) :]]
    parts = [part for each in lengths for part in _batch_of(each).split(num_parts)]
    # In the short last step of an epoch a rank may have none.
    with_tokens = [part for part in parts if part.num_tokens]
    read = {max(range(len(plans)), key=lambda step: int(lengths[step].sum()))}
    if num_items:
        # Rows of users and of negatives grow with the sequences, not with their tokens.
        read.add(max(range(len(plans)), key=lambda step: len(plans[step].rows)))
    most_samples = max(len(part) for part in parts)
    samples = min(_with_reserve(most_samples), max(plan.global_samples for plan in plans))
    samples = padded_size(samples, fewest=8)
    sizes = choose_sizes([part.num_tokens for part in parts])
    sizes = (*sizes, padded_size(_with_reserve(sizes[-1])))
    blocks = 0
    if not pairs.hold(tokens=sizes[-1], samples=samples):
        blocks = pairs.largest(tokens=sizes[-1], samples=samples)
        kept = [pair_blocks(part.offsets.diff().numpy()) <= blocks for part in with_tokens]
        if sum(kept) < _NEARLY_ALL * len(kept):
            return None
    counts = [rows_of(plans[step]) for step in sorted(read)]
    none = PaddingSizes()
    return PaddingSizes(
        tokens=sizes,
        samples=samples,
        blocks=blocks,
        long=2 * sum(is_long(_grown(part.offsets.diff().numpy(), pairs.rule)) for part in with_tokens)
        > len(with_tokens),
        rows={
            name: none.rows_for(
                name, _with_reserve(max(each.rows[name] for each in counts)), table_rows=table_rows[name]
            )
            for name in table_rows
        },
        items=none.items_for(_with_reserve(max(each.items for each in counts)), num_items=num_items)
        if num_items
        else 0,
    )


def choose_sizes(tokens: Sequence[int]) -> tuple[int, ...]:
    """The sizes that cover such batches with fewest pads, where each further size has its price."""
    grain = LARGE_BATCHES if max(tokens) >= _LARGE else SMALL_BATCHES
    needed = sorted(padded_size(num, steps=grain.steps) for num in tokens)
    price = sum(needed) / grain.price
    chosen = _cheapest(needed, price)
    while len(chosen) > MOST_SIZES:
        price *= 1.5
        chosen = _cheapest(needed, price)
    return chosen


def _cheapest(needed: Sequence[int], price: float) -> tuple[int, ...]:
    """Of ascending sizes those that cost least, pads and their own price added up."""
    # Of every size: what it costs to cover all batches up to it, and the size below it.
    ends = [end for end in range(len(needed)) if end + 1 == len(needed) or needed[end + 1] > needed[end]]
    best: dict[int, tuple[float, int]] = {-1: (0.0, -1)}
    for end in ends:
        best[end] = min(
            (cost + (end - below) * needed[end] + price, below) for below, (cost, _) in best.items()
        )
    chosen, end = [], ends[-1]
    while end >= 0:
        chosen.append(needed[end])
        end = best[end][1]
    return tuple(reversed(chosen))


def _batch_of(lengths: IntArray) -> SequenceBatch:
    """A batch with such sequences, and nothing in them."""
    return SequenceBatch(torch.from_numpy(offsets_of(lengths)))


def _grown(lengths: IntArray, rule: TokenRule | None) -> IntArray:
    return lengths if rule is None else rule.tokens(lengths)


def _with_reserve(num: int) -> int:
    """An eighth more than was seen."""
    return num + -(-num // 8)
