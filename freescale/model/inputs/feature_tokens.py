"""FeatureTokens: where features of events and users go in the sequence that an encoder sees.

    join     added to the token of their event, or of every event of the user
    front    a token of their own, before the history
    after    a token of their own, behind their event

    events      e0          e1          e2              user features u, v in front, an outcome o behind its event
    sequence    u v e0 o0   e1 o1       e2 o2           causal attention: an event sees the user, and what came of
    states for the head ↑       ↑           ↑           earlier events; what comes next is predicted behind the outcome

An outcome is joined to events that have happened. A candidate has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data import Feature, SequenceBatch, TokenRule
from freescale.jagged import group_index, offsets_of
from freescale.kernels import SequenceLayout, Sum
from freescale.kernels.rows import take
from freescale.kernels.runtime import on_device, to_device
from freescale.model.inputs.feature_join import FeatureJoin, How
from freescale.model.inputs.padded_places import padded_places


@dataclass(frozen=True)
class TokenSequence:
    """What an encoder is given.

    Args:
        vectors: [T', D] one a token; or a sum that makes them.
        batch: carries "time" and "target_time" of every token, where the batch does.
        layout: of the tokens.
        states: [T] for each event, the last token that belongs to it; None: the event's own.
    """

    vectors: Tensor | Sum
    batch: SequenceBatch
    layout: SequenceLayout
    states: Tensor | None


class FeatureTokens(nn.Module):
    """Puts features of events and users into sequences.

    Args:
        features: of events and users, in the order of the schema; those of items are part of item vectors.
        widths: of the rows of every table.
        dim: width of tokens.
        how: how joined features are put together.
    """

    def __init__(
        self, features: Sequence[Feature], *, widths: Mapping[str, int], dim: int, how: How = "sum"
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"widths": widths, "dim": dim}

        def chosen(place: str, owner: str) -> list[Feature]:
            return [each for each in features if each.place == place and each.of == owner]

        # What is said of a request stands at its candidates; events have no value of it.
        events = [each for each in features if each.place == "join" and each.of in ("event", "request")]
        users = chosen("join", "user")
        self.events = FeatureJoin(events, **options, how=how) if events else None
        self.users = FeatureJoin(users, **options, how=how) if users else None
        # Of users, and crosses of a request's only candidate.
        front = [each for each in features if each.place == "front"]
        self.front = nn.ModuleList(FeatureJoin([each], **options) for each in front)
        self.after = nn.ModuleList(FeatureJoin([each], **options) for each in chosen("after", "event"))
        # Tokens of their own are no items: what they are is learnt, a vector for each.
        self.kind = (
            nn.Parameter(torch.zeros(len(self.front) + len(self.after), dim)) if self.extends else None
        )

    @property
    def extends(self) -> bool:
        """Whether there are tokens besides those of events."""
        return len(self.front) + len(self.after) > 0

    @property
    def rule(self) -> TokenRule:
        """How many tokens histories become."""
        return TokenRule(len(self.front), len(self.after))

    def tables(self) -> set[str]:
        """Whose rows are needed."""
        return {table for part in self.modules() if isinstance(part, FeatureJoin) for table in part.tables()}

    def joined(
        self,
        vectors_TD: Tensor,
        batch: SequenceBatch,
        rows: Mapping[str, Tensor],
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """[T, D] vectors of events from those of their items; `layout`: of a batch that may be padded."""
        if self.events is not None:
            vectors_TD = vectors_TD + self.events(batch.tokens, rows)
        if self.users is not None:
            if layout is not None and layout.padded:
                owner = layout.sequence_of_token
            else:
                owner = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
                owner = on_device(owner, vectors_TD.device)
            # Gradients of a user add up in a fixed order.
            vectors_TD = vectors_TD + take(self.users(batch.samples, rows), owner)
        return vectors_TD

    def forward(
        self, vectors_TD: Tensor, batch: SequenceBatch, layout: SequenceLayout, rows: Mapping[str, Tensor]
    ) -> TokenSequence:
        """The sequence of a batch, from the vectors of its items and the unique rows of every table."""
        vectors_TD = self.joined(vectors_TD, batch, rows, layout)
        if not self.extends:
            return TokenSequence(vectors_TD, batch, layout, None)
        assert self.kind is not None
        if layout.longer is not None:
            return self._padded(vectors_TD, batch, layout, layout.longer, rows)
        places = _Places.of(batch.offsets.numpy(), self.rule, batch.targets)
        kinds = iter(self.kind)
        used = on_device(torch.from_numpy(places.samples), vectors_TD.device)
        front = [
            (part(batch.samples, rows) + next(kinds)).index_select(0, used).to(vectors_TD.dtype)
            for part in self.front
        ]
        events = None if batch.targets is None else on_device(torch.from_numpy(places.events), used.device)
        after = [
            _rows(part(batch.tokens, rows) + next(kinds), events).to(vectors_TD.dtype) for part in self.after
        ]
        order, back = (on_device(torch.from_numpy(each), vectors_TD.device) for each in places.order)
        vectors: Tensor = _Reordered.apply(torch.cat([*front, vectors_TD, *after]), order, back)  # type: ignore[no-untyped-call]
        longer = _longer(batch, places, vectors.device)
        last = on_device(torch.from_numpy(places.last), vectors.device)
        return TokenSequence(vectors, longer, SequenceLayout(longer.offsets, device=vectors.device), last)

    def _padded(
        self,
        vectors_TD: Tensor,
        batch: SequenceBatch,
        layout: SequenceLayout,
        longer: SequenceLayout,
        rows: Mapping[str, Tensor],
    ) -> TokenSequence:
        """The same of a padded batch: what stands where is worked out on the device, from where sequences begin."""
        assert self.kind is not None
        kinds = iter(self.kind)
        front = [(part(batch.samples, rows) + next(kinds)).to(vectors_TD.dtype) for part in self.front]
        after = [(part(batch.tokens, rows) + next(kinds)).to(vectors_TD.dtype) for part in self.after]
        places = padded_places(layout, longer, self.rule)
        vectors: Tensor = _Reordered.apply(  # type: ignore[no-untyped-call]
            torch.cat([*front, vectors_TD, *after]), places.order, places.back
        )
        sequence = SequenceBatch(
            offsets=longer.offsets,
            tokens={
                name: batch.tokens[name].index_select(0, places.event)
                for name in ("time", "target_time")
                if name in batch.tokens
            },
            samples={"row": batch.samples["row"]},
            pads=longer.num_tokens - longer.num_real,
        )
        return TokenSequence(vectors, sequence, longer, places.last)


class FrontPlaces(NamedTuple):
    """Where the tokens of sequences with some in front come from.

    Args:
        order: [T'] for each token its place among all front tokens, feature by feature, and then the events.
        num_front: front tokens in all.
        samples: those that have events.
    """

    order: Tensor
    num_front: int
    samples: Tensor


def longer_sequence(
    batch: SequenceBatch, rule: TokenRule, *, device: torch.device
) -> tuple[TokenSequence, FrontPlaces]:
    """The sequence of a batch with tokens in front, still without vectors, and where they come from.

    What belongs to a token is worked out where it is wanted: on the host it would take longer than a GPU computes.
    """
    offsets, front = batch.offsets.numpy(), rule.front
    lengths = np.diff(offsets)
    used = lengths > 0
    sizes = np.where(used, lengths + front, 0)
    longer = offsets_of(sizes)
    number, samples = np.cumsum(used) - 1, np.flatnonzero(used)
    facts = np.stack([longer[:-1], offsets[:-1], number, sizes]).astype(np.int64)
    (told, samples_there) = to_device(facts, samples, device=device)
    per_token = told[:3].repeat_interleave(told[3], dim=1, output_size=int(longer[-1]))
    position = torch.arange(int(longer[-1]), device=device) - per_token[0]
    event = per_token[1] + position - front
    in_front = position < front
    order = torch.where(in_front, position * len(samples) + per_token[2], event + front * len(samples))
    times = torch.where(in_front, per_token[1], event)
    last = None
    if batch.targets is None:
        owner = torch.repeat_interleave(
            told[0] - told[1] + front, told[3] - torch.where(told[3] > 0, front, 0)
        )
        last = torch.arange(int(offsets[-1]), device=device) + owner
    made = SequenceBatch(
        offsets=torch.from_numpy(longer),
        tokens={
            name: batch.tokens[name].index_select(0, times)
            for name in ("time", "target_time")
            if name in batch.tokens
        },
        samples={"row": batch.samples["row"]},
        targets=batch.targets,
    )
    layout = SequenceLayout(made.offsets, device=device)
    sequence = TokenSequence(torch.empty(0, device=device), made, layout, last)
    return sequence, FrontPlaces(order, front * len(samples), samples_there)


def _longer(batch: SequenceBatch, places: _Places, device: torch.device) -> SequenceBatch:
    """The longer sequences, with the times of their tokens."""
    tokens: dict[str, Tensor] = {
        name: batch.tokens[name].index_select(0, on_device(torch.from_numpy(places.event), device))
        for name in ("time", "target_time")
        if name in batch.tokens
    }
    return SequenceBatch(
        offsets=torch.from_numpy(places.offsets),
        tokens=tokens,
        samples={"row": batch.samples["row"]},
        targets=batch.targets,
    )


@dataclass(frozen=True)
class _Places:
    """Where the tokens of longer sequences come from.

    Args:
        offsets: [B + 1] of the longer sequences.
        order: [T'] for each token, its place among all front tokens, feature by feature, then events, then all tokens
            behind events, feature by feature; and the other way round.
        event: [T'] for each token, the event whose times it has: the first one for those in front.
        last: [T] for each event, the last token that belongs to it.
        samples: those that have events.
        events: [events] which of the T are events; the others are candidates, which have no tokens behind them.
    """

    offsets: np.ndarray
    order: tuple[np.ndarray, np.ndarray]
    event: np.ndarray
    last: np.ndarray
    samples: np.ndarray
    events: np.ndarray

    @classmethod
    def of(cls, offsets: np.ndarray, rule: TokenRule, targets: Tensor | None = None) -> _Places:
        lengths = np.diff(offsets)
        shown = np.zeros_like(lengths) if targets is None else targets.numpy()
        sizes = np.where(lengths > 0, rule.front + lengths + (lengths - shown) * rule.after, 0)
        longer = offsets_of(sizes)
        samples = np.flatnonzero(lengths)
        num_tokens = int(offsets[-1])
        owner, number = group_index(lengths)
        before = np.minimum(number, (lengths - shown)[owner])
        first = longer[owner] + rule.front + number + before * rule.after
        is_event = number < (lengths - shown)[owner]
        events = np.flatnonzero(is_event)
        back = np.concatenate(
            [
                *(longer[samples] + n for n in range(rule.front)),
                first,
                *(first[events] + n for n in range(1, 1 + rule.after)),
            ]
        ).astype(np.int64)
        times = np.concatenate(
            [np.tile(offsets[samples], rule.front), np.arange(num_tokens), *([events] * rule.after)]
        ).astype(np.int64)
        order = np.empty_like(back)
        order[back] = np.arange(len(back))
        last = (first + np.where(is_event, rule.after, 0)).astype(np.int64)
        return cls(longer, (order, back), times[order], last, samples, events)


def _rows(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)


class _Reordered(torch.autograd.Function):
    """Rows in another order; each goes to one place, so the gradient is a gather, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
