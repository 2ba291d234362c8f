"""AttentionMask: the `MaskRule` that the kernels know; what a token may see beyond "everything before it".

A token always sees itself. Otherwise token i of a sequence sees token j when

    j is not a target, and
        j <= i  and  (close enough or j in the prefix)  and  (same segment or j is a summary)
        or  i is in the prefix and no target

Targets all stand at one position, right after the last event: `window` and the position bias count from there
(`shared_position`). So k targets in one pass are the same as k passes with one. `sees` is this sentence in code. The
planner of tiles (`plan.tile_pairs`), `plan.visibility.KeyVisibility`, `triton.tiles.visible` and `segment_runs` are
faster ways to the same answer, each tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeGuard, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.kernels.attention.mask_rule import (
    Attributes,
    MaskRule,
    check_attribute,
    check_attributes,
    visible_in_sequence,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NO_WINDOW = 2**31 - 1


class Pieces(NamedTuple):
    """Runs of neighbouring tokens of one segment and one kind: all that planning must know of them.

    Args:
        starts: first token of each, rising from 0.
        segment: number of its segment.
        summary: whether its tokens are summaries.
    """

    starts: Ints
    segment: Ints
    summary: Bools

    def within(self, starts: Ints) -> Pieces:
        """The same, none of them in two sequences; sequences begin at `starts`, the last of which is the end."""
        cut = np.union1d(self.starts, starts[:-1])
        cut = cut[cut < starts[-1]]
        of = np.searchsorted(self.starts, cut, side="right") - 1
        return Pieces(cut, self.segment[of], self.summary[of])


@final
@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which earlier tokens a token sees; make one a batch, and share it between layers.

    Counts are wanted on the CPU. So are segments and summaries, unless `pieces` says the same in short.

    Args:
        window: see at most this many tokens back.
        prefix: this many tokens at the start of each sequence see the whole history and are seen from everywhere.
        targets: [B] how many tokens at the end of each sequence are candidates: they do not see each other and stand at
            one position, the first after the events.
        only_targets: all other tokens see nothing and get zeros: for a last layer of which only targets are wanted.
        segments: [T] number of the segment a token belongs to.
        summaries: [T] true for tokens that later segments may see too; needs `segments`.
        pieces: the runs of equal tokens in `segments` and `summaries`; found there unless given.
    """

    window: int | None = None
    prefix: int = 0
    targets: Tensor | None = None
    only_targets: bool = False
    segments: Tensor | None = None
    summaries: Tensor | None = None
    pieces: Pieces | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be 0 or more, got {self.window}")
        if self.prefix < 0:
            raise ValueError(f"prefix must be 0 or more, got {self.prefix}")
        if self.only_targets and self.targets is None:
            raise ValueError("only_targets needs targets")
        if self.summaries is not None and self.segments is None:
            raise ValueError("summaries need segments")
        for name, each in (("targets", "sequence"), ("segments", "token"), ("summaries", "token")):
            if getattr(self, name) is not None:
                check_attribute(name, getattr(self, name), each=each)

    @property
    def looks_ahead(self) -> bool:
        """Only a prefix does."""
        return self.prefix > 0

    @property
    def per_token(self) -> Attributes:
        """Segments and summaries, where they are given."""
        return _given(segments=self.segments, summaries=self.summaries)

    @property
    def per_sequence(self) -> Attributes:
        """Numbers of targets, where they are given."""
        return _given(targets=self.targets)

    def sees(
        self,
        i: Tensor,
        j: Tensor,
        *,
        length: Tensor,
        query: Attributes,
        key: Attributes,
        sequence: Attributes,
    ) -> Tensor:
        """True where token i sees token j; see `MaskRule`."""
        history = length if self.targets is None else length - sequence["targets"]
        seen = j <= i
        if self.window is not None:
            seen = seen & ((torch.minimum(i, history) - j <= self.window) | (j < self.prefix))
        if self.segments is not None:
            same = query["segments"] == key["segments"]
            if self.summaries is not None:
                same = same | key["summaries"].bool()
            seen = seen & same
        ahead = (i < self.prefix) & (i < history)
        seen = ((seen | ahead) & (j < history)) | (i == j)
        return seen & (i >= history) if self.only_targets else seen

    def check(self, lengths: Ints) -> None:
        """Refuse counts that do not fit these sequences."""
        check_attributes(self, lengths)
        counts = self.target_counts(len(lengths))
        if (counts < 0).any() or (counts > lengths).any():
            raise ValueError("targets must be between 0 and the length of their sequence")

    def target_counts(self, num_sequences: int) -> Ints:
        """Targets of every sequence."""
        if self.targets is None:
            return np.zeros(num_sequences, np.int64)
        return self.targets.cpu().numpy().astype(np.int64)

    @cached_property
    def runs(self) -> Pieces | None:
        """The pieces, given or found; None without segments."""
        if self.pieces is not None or self.segments is None:
            return self.pieces
        segments = self.segments.cpu().numpy().astype(np.int64)
        summaries = np.zeros(len(segments), bool)
        if self.summaries is not None:
            summaries = self.summaries.cpu().numpy().astype(bool)
        changes = np.flatnonzero((np.diff(segments) != 0) | (np.diff(summaries) != 0)) + 1
        starts = np.concatenate([[0], changes])[: len(segments)]
        return Pieces(starts, segments[starts], summaries[starts])

    def allowed(self, start: int, stop: int, num_targets: int) -> Tensor:
        """The plain truth for one sequence: [length, length], true where row sees column."""
        targets = None if self.targets is None else torch.tensor([num_targets])
        return visible_in_sequence(replace(self, targets=targets), 0, start, stop, torch.device("cpu"))


def kernels_know(mask: MaskRule | None) -> TypeGuard[AttentionMask | None]:
    """Whether the compiled loops, the Triton kernels and the fused HSTU layer know a mask, or it must be asked.

    The one place where this is decided. A class that is derived from AttentionMask may say something else.
    """
    return mask is None or type(mask) is AttentionMask


def shared_position(mask: MaskRule | None, lengths: Ints) -> Ints | None:
    """[B] the position at which all targets of a sequence stand, its events' number; None where there are none."""
    if not isinstance(mask, AttentionMask) or mask.targets is None:
        return None
    return lengths - mask.target_counts(len(lengths))


def _given(**attributes: Tensor | None) -> dict[str, Tensor]:
    return {name: values for name, values in attributes.items() if values is not None}
