"""SequenceBatch: jagged sequences of several features in flat tensors plus offsets; nothing is padded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of sequences of different lengths.

    Args:
        offsets: [B + 1] int64; sequence b holds the tokens offsets[b] to offsets[b + 1]. Always on the CPU, so that
            shapes are known without waiting for the GPU.
        tokens: features with one value a token, each [T] or [T, ...] ("item", "target", "time", ...).
        samples: features with one value a sequence, each [B] or [B, ...] ("row", "negatives", ...).
    """

    offsets: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) == 0 or self.offsets.is_cuda:
            raise ValueError("offsets must be a CPU tensor [B + 1]")
        if int(self.offsets[0]) != 0 or bool((self.offsets.diff() < 0).any()):
            raise ValueError("offsets must start at 0 and never fall")
        for kind, features, size in (
            ("token", self.tokens, self.num_tokens),
            ("sample", self.samples, len(self)),
        ):
            for name, values in features.items():
                if len(values) != size:
                    raise ValueError(f"{kind} feature {name!r} has {len(values)} values, expected {size}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
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
        for values in (*self.tokens.values(), *self.samples.values()):
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
        for values in (*self.tokens.values(), *self.samples.values()):
            values.record_stream(stream)

    def select(self, index: Tensor | Sequence[int]) -> SequenceBatch:
        """The sequences with these numbers, in this order; a number may occur twice."""
        index = torch.as_tensor(index, dtype=torch.int64)
        lengths = self.lengths[index]
        offsets = _offsets(lengths)
        shift = torch.repeat_interleave(self.offsets[:-1][index] - offsets[:-1], lengths)
        rows = torch.arange(int(offsets[-1])) + shift
        return SequenceBatch(
            offsets=offsets,
            tokens={n: v.index_select(0, rows.to(v.device)) for n, v in self.tokens.items()},
            samples={n: v.index_select(0, index.to(v.device)) for n, v in self.samples.items()},
        )

    def split(self, num_parts: int) -> list[SequenceBatch]:
        """Contiguous parts of about equal token counts, as views; a part may be empty."""
        targets = torch.arange(1, num_parts) * (self.num_tokens / num_parts)
        cuts = [0, *torch.searchsorted(self.offsets.double(), targets.double()).tolist(), len(self)]
        return [self._slice(first, last) for first, last in itertools.pairwise(cuts)]

    @staticmethod
    def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """The sequences of several batches, one after the other."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        first = batches[0]
        for batch in batches:
            if different := (first.tokens.keys() ^ batch.tokens.keys()) | (
                first.samples.keys() ^ batch.samples.keys()
            ):
                raise ValueError(f"only some of the batches have {', '.join(sorted(different))}")
        return SequenceBatch(
            offsets=_offsets(torch.cat([batch.lengths for batch in batches])),
            tokens={n: torch.cat([batch.tokens[n] for batch in batches]) for n in first.tokens},
            samples={n: torch.cat([batch.samples[n] for batch in batches]) for n in first.samples},
        )

    def with_tokens(self, **features: Tensor) -> SequenceBatch:
        """The same batch with token features added or replaced."""
        return replace(self, tokens={**self.tokens, **features})

    def with_samples(self, **features: Tensor) -> SequenceBatch:
        """The same batch with sample features added or replaced."""
        return replace(self, samples={**self.samples, **features})

    def _slice(self, first: int, last: int) -> SequenceBatch:
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        return SequenceBatch(
            offsets=self.offsets[first : last + 1] - start,
            tokens={n: v[start:stop] for n, v in self.tokens.items()},
            samples={n: v[first:last] for n, v in self.samples.items()},
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> SequenceBatch:
        return replace(
            self,
            tokens={n: change(v) for n, v in self.tokens.items()},
            samples={n: change(v) for n, v in self.samples.items()},
        )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
