"""ContextTokens: sequences as DLRMv4 has them, where items come as `ItemTowers` make them.

    front      every id of the user and every cross of the candidate: its row times a matrix of its own
    events     the first half of the item's vector, and what came of the event: its bits through an MLP
    candidate  the same with a learnt vector in place of bits

n bits have 2^n values, so the MLP of bits sees 2^n + 1 inputs, however many events there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from freescale.data import FIRST, SLOT, Feature, SequenceBatch, TokenRule
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout, Sum, Taken
from freescale.kernels.rows import take
from freescale.model.inputs.feature_tokens import TokenSequence, longer_sequence
from freescale.model.parts.blocks import Linear
from freescale.model.parts.normed_mlp import normed_mlp

_BIT_WIDTH, _BIT_STD = 8, 0.1
_MOST_BITS = 12


class ContextTokens(nn.Module):
    """Puts what came of events into their tokens, and ids in front of them.

    Args:
        features: at most one of bits that events have; the others are ids that stand in front.
        widths: of the rows of every table.
        dim: width of tokens.
        hidden: width inside the MLP of bits.
    """

    def __init__(
        self, features: Sequence[Feature], *, widths: Mapping[str, int], dim: int, hidden: int
    ) -> None:
        super().__init__()
        self.dim = dim
        bits = [each for each in features if each.kind == "bits" and each.place == "join"]
        self._front = [each for each in features if each.place == "front" and each.kind == "id"]
        strange = [each.name for each in features if each not in bits and each not in self._front]
        if strange or len(bits) > 1 or any(len(each.names) > _MOST_BITS for each in bits):
            raise ConfigError(
                "tokens.join=towers reads bits of events, one feature of them, and ids in front",
                got=", ".join(strange or [each.name for each in bits]),
                allowed=f"one feature of at most {_MOST_BITS} bits; ids of users and crosses with as: front",
                next_step="name the features to read in the section features, or set tokens.join=mlp",
            )
        self._bits = bits[0] if bits else None
        if self._bits is not None:
            width = len(self._bits.names) * _BIT_WIDTH
            self.bits = nn.Parameter(torch.empty(len(self._bits.names), _BIT_WIDTH).normal_(std=_BIT_STD))
            self.blank = nn.Parameter(torch.empty(1, width).normal_(std=_BIT_STD))
            self.of_bits = normed_mlp(width, hidden, dim)
        self.front = nn.ModuleList(_context(widths[each.lookup_table], dim) for each in self._front)

    @property
    def extends(self) -> bool:
        """Whether there are tokens besides those of events."""
        return len(self._front) > 0

    @property
    def rule(self) -> TokenRule:
        """How many tokens histories become."""
        return TokenRule(len(self._front), 0)

    def tables(self) -> set[str]:
        """Whose rows are needed."""
        return {each.lookup_table for each in self._front}

    def joined(self, vectors_TD: Tensor, batch: SequenceBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """[T, D] vectors of events from those of their items, of which they begin with the first half."""
        vectors = vectors_TD[:, : self.dim]
        if self._bits is None:
            return vectors
        return vectors + take(self._of_bits().to(vectors.dtype), self._codes(self._bits, batch))

    def from_rows(
        self, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout, tables: Mapping[str, Tensor]
    ) -> TokenSequence:
        """The sequence of a batch, from the unique vectors of its items and the unique rows of every table.

        Its vectors are a sum that is still to be taken: who takes it adds what else belongs to a token.
        """
        items = rows_UD[:, : self.dim]
        of_items, codes = batch.tokens["item_index"], None
        if self._bits is not None:
            codes = self._codes(self._bits, batch)
        if not self._front:
            return TokenSequence(self._sum(items, of_items, codes), batch, layout, None)
        sequence, places = longer_sequence(batch, self.rule, device=items.device)
        event = places.order - places.num_front
        past = event >= 0
        own = event.clamp(min=0)
        of_items = torch.where(past, of_items.index_select(0, own), -1)
        codes = None if codes is None else torch.where(past, codes.index_select(0, own), -1)
        front = torch.cat(
            [
                part(
                    _row_of(
                        tables[each.lookup_table],
                        batch.samples[each.name + SLOT].index_select(0, places.samples),
                    )
                )
                for each, part in zip(self._front, self.front)
            ]
        )
        added = self._sum(
            items, of_items, codes, (front.to(items.dtype), torch.where(past, -1, places.order))
        )
        return replace(sequence, vectors=added)

    def _sum(
        self,
        items: Tensor,
        of_items: Tensor,
        codes: Tensor | None,
        front: tuple[Tensor, Tensor] | None = None,
    ) -> Sum:
        parts = [Taken(items, of_items)]
        if codes is not None:
            parts.append(Taken(self._of_bits().to(items.dtype), codes))
        if front is not None:
            parts.append(Taken(*front))
        return Sum(tuple(parts))

    def _of_bits(self) -> Tensor:
        """[2^n + 1, dim] of every value that bits can have, and last of none."""
        num = len(self.bits)
        values = torch.arange(1 << num, device=self.bits.device)
        is_set = (values[:, None] >> torch.arange(num, device=values.device)) & 1
        inputs = (is_set[:, :, None] * self.bits).flatten(1)
        found: Tensor = self.of_bits(torch.cat([inputs, self.blank]))
        return found

    def _codes(self, feature: Feature, batch: SequenceBatch) -> Tensor:
        """[T] which of those each token has; candidates the last."""
        num = 1 << len(feature.names)
        codes = batch.tokens[feature.name].long() & (num - 1)
        if batch.targets is None:
            return codes
        return codes.index_fill(0, batch.candidate_index(codes.device), num)


def _row_of(rows: Tensor, slot: Tensor) -> Tensor:
    """[n, width] the row of each; zeros where there is no id."""
    if not len(rows):  # nobody in the batch has one; zeros that know where they come from
        return rows.new_zeros(len(slot), rows.shape[1]) + rows.sum()
    return torch.where((slot >= FIRST)[:, None], take(rows, (slot - FIRST).clamp(min=0)), 0)


def _context(width: int, dim: int) -> Linear:
    part = Linear(width, dim)
    nn.init.normal_(part.weight, std=(2 / (width + dim)) ** 0.5)
    nn.init.zeros_(part.bias)
    return part
