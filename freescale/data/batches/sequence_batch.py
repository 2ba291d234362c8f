"""SequenceBatch: jagged sequences of several features in flat tensors plus offsets.

No sequence is padded. The batch as a whole may be: behind its last sequence features can have values that belong to
none, so that batches of different sizes have tensors of the same size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freescale.jagged import group_index, spans
from freescale.kernels.runtime import to_device

_ALIGNED = 64
"""Bytes: where tensors begin in the block in which they travel between processes."""


_COUNTS = ("targets", "learnt")


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of sequences of different lengths.

    Args:
        offsets: [B + 1] int64; sequence b holds the tokens offsets[b] to offsets[b + 1]. Always on the CPU, so that
            shapes are known without waiting for the GPU.
        tokens: features with one value a token, each [T] or [T, ...] ("item", "target", "time", ...).
        samples: features with one value a sequence, each [B] or [B, ...] ("row", "negatives", ...).
        pads: values that token features have behind those of the last sequence, which mean nothing.
        items: features with one value for each distinct item of the batch, each [U] or [U, ...]. Where there are any,
            token features "item_index" and "target_index" and sample feature "negative_index" point to them.
        targets: [B] int64 how many tokens at the end of each sequence are candidates of a request; on the CPU like
            offsets. None: all tokens are events.
        learnt: [B] int64 how many tokens at the end of each sequence have a loss; on the CPU like offsets. None: all.
    """

    offsets: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)
    pads: int = 0
    items: dict[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None
    learnt: Tensor | None = None

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) == 0 or self.offsets.is_cuda:
            raise ValueError("offsets must be a CPU tensor [B + 1]")
        places = self.offsets.numpy()
        if places[0] != 0 or (places[1:] < places[:-1]).any():
            raise ValueError("offsets must start at 0 and never fall")
        self._check(self.tokens, self.samples)
        for name in _COUNTS:
            values = getattr(self, name)
            if values is None:
                continue
            counts, lengths = values.numpy(), self.lengths.numpy()
            if counts.shape != lengths.shape or (counts < 0).any() or (counts > lengths).any():
                raise ValueError(f"{name} must be between 0 and the length of their sequence, one for each")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of each sequence."""
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        """Where the features live."""
        for values in self.features():
            return values.device
        return self.offsets.device

    @classmethod
    def from_sequences(cls, sequences: Sequence[dict[str, Tensor]]) -> SequenceBatch:
        """A batch of token features from one dict a sequence."""
        if not sequences:
            return cls(offsets=torch.zeros(1, dtype=torch.int64))
        names = sequences[0].keys()
        lengths = torch.tensor([len(next(iter(s.values()))) for s in sequences])
        for sequence, length in zip(sequences, lengths.tolist()):
            for name, values in sequence.items():
                if len(values) != length:
                    raise ValueError(
                        f"token feature {name!r} has {len(values)} values in a sequence of {length}"
                    )
        return cls(offsets=_offsets(lengths), tokens={n: torch.cat([s[n] for s in sequences]) for n in names})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SequenceBatch:
        """The same batch with its features on another device."""
        return self._map(lambda values: values.to(device, non_blocking=non_blocking))

    def pin(self) -> SequenceBatch:
        """The same batch in page-locked memory, from which copies to a GPU run on their own."""
        return self._map(lambda values: values.pin_memory())

    # The name torch's DataLoader looks for.
    pin_memory = pin

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses these tensors too."""
        for values in self.features():
            values.record_stream(stream)

    def counts(self) -> dict[str, Any]:
        """Which of `targets` and `learnt` it has."""
        found = {name: getattr(self, name) for name in _COUNTS}
        return {name: values for name, values in found.items() if values is not None}

    def features(self) -> Iterator[Tensor]:
        """All tensors but the offsets."""
        return itertools.chain(self.tokens.values(), self.samples.values(), self.items.values())

    def select(self, index: Tensor | Sequence[int]) -> SequenceBatch:
        """The sequences with these numbers, in this order and without pads; a number may occur twice."""
        index = torch.as_tensor(index, dtype=torch.int64)
        rows, offsets = _spans(self.offsets[:-1][index], self.lengths[index])
        return SequenceBatch(
            offsets=offsets,
            tokens={n: v.index_select(0, rows.to(v.device)) for n, v in self.tokens.items()},
            samples={n: v.index_select(0, index.to(v.device)) for n, v in self.samples.items()},
            items=self.items,
            **{name: values[index] for name, values in self.counts().items()},
        )

    def one_target_each(self) -> SequenceBatch:
        """A sequence for every candidate: the events before it and itself; in their order, on the CPU."""
        assert self.targets is not None
        events = self.lengths - self.targets
        owner, number = (torch.from_numpy(each) for each in group_index(self.targets.numpy()))
        rows, offsets = _spans(self.offsets[:-1][owner], events[owner] + 1)
        rows[offsets[1:] - 1] += number
        return SequenceBatch(
            offsets=offsets,
            tokens={n: v.index_select(0, rows) for n, v in self.tokens.items()},
            samples={n: v.index_select(0, owner) for n, v in self.samples.items()},
            items=self.items,
            targets=torch.ones_like(owner),
        )

    def split(self, num_parts: int) -> list[SequenceBatch]:
        """Contiguous parts of about equal token counts, as views and without pads; a part may be empty."""
        targets = torch.arange(1, num_parts) * (self.num_tokens / num_parts)
        cuts = [0, *torch.searchsorted(self.offsets.double(), targets.double()).tolist(), len(self)]
        return [self._slice(first, last) for first, last in itertools.pairwise(cuts)]

    def with_tokens(self, **features: Tensor) -> SequenceBatch:
        """The same batch with token features added or replaced."""
        self._check(features, {})
        return self._with({**self.tokens, **features}, self.samples)

    def with_samples(self, **features: Tensor) -> SequenceBatch:
        """The same batch with sample features added or replaced."""
        self._check({}, features)
        return self._with(self.tokens, {**self.samples, **features})

    def with_learnt(self, counts: Tensor) -> SequenceBatch:
        """The same batch with losses only at so many tokens at the end of each sequence."""
        return SequenceBatch(
            self.offsets, self.tokens, self.samples, self.pads, self.items, self.targets, counts
        )

    def learnt_part(self) -> tuple[Tensor, SequenceBatch]:
        """The tokens that have a loss, as a batch of their own, and where they stand; on the device of the features."""
        assert self.learnt is not None
        return self.part(self.lengths - self.learnt, self.learnt)

    def part(
        self, first: Tensor, count: Tensor, *, device: torch.device | None = None
    ) -> tuple[Tensor, SequenceBatch]:
        """Tokens first .. first + count - 1 of every sequence as a batch, and where they stand among all.

        Args:
            first: [B] on the CPU like offsets.
            count: [B] likewise.
            device: where it is wanted where they stand; that of the features unless given.
        """
        index, offsets = spans((self.offsets[:-1] + first).numpy(), count.numpy())
        (where,) = to_device(index, device=self.device if device is None else device)
        tokens = {
            name: values.index_select(0, where.to(values.device)) for name, values in self.tokens.items()
        }
        return where, SequenceBatch(torch.from_numpy(offsets), tokens, self.samples, items=self.items)

    def candidate_index(self, device: torch.device) -> Tensor:
        """[K] where the candidates of all requests stand among the tokens."""
        assert self.targets is not None
        counts = self.targets.numpy()
        return to_device(spans(self.offsets.numpy()[1:] - counts, counts)[0], device=device)[0]

    def with_items(self, **features: Tensor) -> SequenceBatch:
        """The same batch with features of its distinct items added or replaced."""
        return self._with(self.tokens, self.samples, {**self.items, **features})

    def _slice(self, first: int, last: int) -> SequenceBatch:
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        return SequenceBatch(
            offsets=self.offsets[first : last + 1] - start,
            tokens={n: v[start:stop] for n, v in self.tokens.items()},
            samples={n: v[first:last] for n, v in self.samples.items()},
            items=self.items,
            **{name: values[first:last] for name, values in self.counts().items()},
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> SequenceBatch:
        tokens, samples, items = (
            {n: change(v) for n, v in part.items()} for part in (self.tokens, self.samples, self.items)
        )
        return self._with(tokens, samples, items)

    def _with(
        self, tokens: dict[str, Tensor], samples: dict[str, Tensor], items: dict[str, Tensor] | None = None
    ) -> SequenceBatch:
        """The same sequences with other features; their offsets have been looked at once."""
        batch = object.__new__(SequenceBatch)
        kept = self.items if items is None else items
        batch.__dict__.update(self.__dict__, tokens=tokens, samples=samples, items=kept)
        return batch

    def _check(self, tokens: Mapping[str, Tensor], samples: Mapping[str, Tensor]) -> None:
        """Refuse features that do not have one value a token, or a sequence."""
        places = self.num_tokens + self.pads
        for kind, features, size in (("token", tokens, places), ("sample", samples, len(self))):
            for name, values in features.items():
                if len(values) != size:
                    raise ValueError(f"{kind} feature {name!r} has {len(values)} values, expected {size}")

    def __reduce__(self) -> tuple[Any, ...]:
        """As one block of bytes: a loader process opens a connection for every tensor it hands over, 0.2 ms each."""
        counts = self.counts()
        tensors = [self.offsets, *counts.values(), *self.features()]
        if self.pads or any(values.device.type != "cpu" or values.requires_grad for values in tensors):
            return object.__new__, (SequenceBatch,), dict(self.__dict__)
        flat = [values.contiguous().view(-1).view(torch.uint8) for values in tensors]
        ends = list(itertools.accumulate(-(-len(part) // _ALIGNED) * _ALIGNED for part in flat))
        block = torch.zeros(ends[-1], dtype=torch.uint8)
        starts = [0, *ends[:-1]]
        for part, start in zip(flat, starts):
            block[start : start + len(part)] = part
        shapes = [(start, values.dtype, tuple(values.shape)) for start, values in zip(starts, tensors)]
        names = (list(self.tokens), list(self.samples), list(self.items))
        return _unpacked, (block, shapes, *names, list(counts))


def _unpacked(
    block: Tensor,
    shapes: Sequence[tuple[int, torch.dtype, tuple[int, ...]]],
    tokens: list[str],
    samples: list[str],
    items: list[str],
    counts: list[str],
) -> SequenceBatch:
    """The batch whose tensors lie in a block of bytes, at these places."""
    parts: list[Tensor] = []
    for start, dtype, shape in shapes:
        num_bytes = dtype.itemsize * math.prod(shape)
        parts.append(block[start : start + num_bytes].view(dtype).view(shape))
    offsets, features = parts[0], iter(parts[1 + len(counts) :])
    # In this order: each takes what the one before has left.
    of_tokens = {name: next(features) for name in tokens}
    of_samples = {name: next(features) for name in samples}
    of_items = {name: next(features) for name in items}
    of_counts: dict[str, Any] = dict(zip(counts, parts[1:]))
    return SequenceBatch(offsets, of_tokens, of_samples, items=of_items, **of_counts)


def _spans(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """By NumPy: on the CPU torch takes half as long again, and three times as long for a few sequences."""
    index, offsets = spans(starts.numpy(), lengths.numpy())
    return torch.from_numpy(index), torch.from_numpy(offsets)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
