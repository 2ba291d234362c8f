"""SequenceLayout: where the sequences of a jagged batch stand; made once a batch, shared by all layers.

Each way to compute attention wants the batch prepared differently; what it needs is made when it first asks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.jagged import group_index
from freescale.kernels.attention.cpu.loop_attention import LoopLayout
from freescale.kernels.attention.cpu.tile_layout import TileLayout
from freescale.kernels.attention.cpu.tile_masks import RuleTiles
from freescale.kernels.attention.inputs import check_offsets
from freescale.kernels.attention.mask import AttentionMask, kernels_know
from freescale.kernels.attention.mask_rule import MaskRule, check_attributes
from freescale.kernels.attention.plan.fills import ListFiller
from freescale.kernels.attention.plan.room import LayoutRoom, pair_blocks
from freescale.kernels.attention.plan.schedule import AttentionSchedule
from freescale.kernels.attention.plan.wishes import LayoutWishes
from freescale.kernels.attention.segment_runs import SegmentRuns
from freescale.kernels.attention.triton.pair_bias import time_buckets
from freescale.kernels.runtime import Alone, Carrier, Parcel, Sealed


class ByLength(NamedTuple):
    """The sequences of a batch, longest first.

    Args:
        sequence: [B] their numbers.
        first: [B] their first tokens.
        reach: [longest] how many of them have a token at each position.
    """

    sequence: Tensor
    first: Tensor
    reach: Tensor


class SequenceLayout:
    """Lengths and positions of the tokens of a batch, and lazily what the attention kernels prepare from them.

    Args:
        offsets: [B + 1] on the CPU, so that making the layout never waits for the GPU.
        block: tokens a tile of the batched products; chosen by length if not given.
        device: where the tensors of the batch live.
        room: of a padded batch. Its tensors have `room.tokens` tokens, those behind the last sequence are pads. What
            belongs to a token is computed for pads, too, and finite; attention gives them zeros, and no loss.
        wishes: notes what is asked for, so that layouts after this one can be made with it.
    """

    def __init__(
        self,
        offsets: Tensor,
        *,
        block: int | None = None,
        device: torch.device | str = "cpu",
        room: LayoutRoom | None = None,
        wishes: LayoutWishes | None = None,
    ) -> None:
        starts = check_offsets(offsets)
        self.offsets = torch.from_numpy(starts) if offsets.dtype != torch.int64 else offsets
        self.device = torch.device(device)
        self.num_real = int(starts[-1])
        self.num_tokens = self.num_real if room is None else room.tokens
        self.lengths: npt.NDArray[np.int64] = np.diff(starts)
        self.longest = int(self.lengths.max(initial=0))
        self.room = room
        if room is not None and not self._fits(room):
            raise ValueError(
                f"{self.num_real} tokens, {self.longest} in a sequence, {pair_blocks(self.lengths)} pairs of blocks "
                f"do not fit into {room}"
            )
        self._wishes = wishes or LayoutWishes()
        self._alone: Carrier = Alone(self.device)
        self._carrier: Carrier = self._alone
        self._block = block
        self._token_tiles: dict[int, Tensor] = {}
        # By the number of a mask, which is kept beside it: rules from outside may have no hash.
        self._checked: dict[int, MaskRule] = {}
        self._runs: tuple[AttentionMask, SegmentRuns] | None = None
        self._rule_tiles: dict[int, tuple[MaskRule, RuleTiles]] = {}
        self._buckets: list[tuple[tuple[object, ...], Any]] = []
        self.longer: SequenceLayout | None = None
        """Of the same sequences with other tokens among theirs, where a padded batch brings it along."""

    def _fits(self, room: LayoutRoom) -> bool:
        fits = self.num_real <= room.tokens and self.longest <= room.longest
        return fits and (not room.blocks or pair_blocks(self.lengths) <= room.blocks)

    @property
    def padded(self) -> bool:
        """Whether there are, or may be, pads behind the last sequence."""
        return self.room is not None

    @property
    def kernel_choice(self) -> tuple[object, ...]:
        """What, beside the sizes of its lists, decides which kernels a batch is computed by."""
        return self.num_tokens, len(self.lengths), self.work.long

    def prepare(self, parcel: Parcel) -> None:
        """Make all that layouts before this one were asked for, and put it into the parcel, which is not sent yet."""
        self._carrier = parcel
        for name, *how in self._wishes.noted():
            if name == "token_tiles":
                self.token_tiles(*how)
            elif name == "by_length":
                _ = self.by_length
        self.work.prepare(parcel)
        self._carrier = self._alone

    def seal(self) -> None:
        """From now on nothing is brought to the device: a recording would read it again when it is old."""
        self._alone = self._carrier = Sealed()
        self.work.seal()
        if self.longer is not None:
            self.longer.seal()

    def _fixed(self, *wish: Any) -> Tensor:
        """A list of a padded batch on its way to the device."""
        assert self.room is not None
        filler = ListFiller(self.offsets.numpy(), self.room)
        return self._carrier.fill(wish, filler.shapes(wish), lambda arrays: filler.fill(wish, arrays))[0]

    @cached_property
    def by_length(self) -> ByLength:
        """The sequences, longest first."""
        self._wishes.note("by_length")
        if self.room is not None:
            sent, num = self._fixed("by_length"), len(self.lengths)
            return ByLength(sent[0, :num], sent[1, :num], sent[2, : self.room.longest])
        order = np.argsort(-self.lengths, kind="stable")
        reach = len(order) - np.cumsum(np.bincount(self.lengths, minlength=1))[: self.longest]
        # Each row begins on 16 bytes, which kernels rely on.
        table = np.zeros((3, max(len(order), len(reach)) + 1 & ~1), np.int64)
        table[0, : len(order)], table[1, : len(order)] = order, self.offsets.numpy()[:-1][order]
        table[2, : len(reach)] = reach
        moved = self._carrier.add(table)[0]
        return ByLength(moved[0, : len(order)], moved[1, : len(order)], moved[2, : len(reach)])

    @cached_property
    def tiles(self) -> TileLayout:
        """The batch for batched products."""
        if isinstance(self._carrier, Sealed):
            self._carrier.add()
        return TileLayout(self.offsets, block=self._block, device=self.device, num_tokens=self.num_tokens)

    @cached_property
    def loops(self) -> LoopLayout:
        """The batch for the CPU loops."""
        return LoopLayout(self.offsets)

    @cached_property
    def work(self) -> AttentionSchedule:
        """The batch for the Triton kernels."""
        return AttentionSchedule(self.offsets, device=self.device, room=self.room, wishes=self._wishes)

    @property
    def device_offsets(self) -> Tensor:
        """The offsets where the tensors of the batch live."""
        return self.work.device_offsets

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each token in its own sequence, worked out on the device: there may be a million of them."""
        starts = self.device_offsets
        token = torch.arange(self.num_tokens, device=self.device)
        if self.room is not None:
            own = torch.searchsorted(starts, token, right=True) - 1
            return (token - starts[own]).masked_fill_(token >= starts[-1], 0)
        return token - torch.repeat_interleave(starts[:-1], starts.diff(), output_size=self.num_tokens)

    @cached_property
    def sequence_of_token(self) -> Tensor:
        """[T] the number of the sequence that each token is in, worked out on the device; of pads that of the last."""
        token = torch.arange(self.num_tokens, device=self.device)
        own = torch.searchsorted(self.device_offsets, token, right=True) - 1
        return own.clamp_(max=max(0, len(self.lengths) - 1))

    def token_tiles(self, block: int) -> Tensor:
        """[tiles, 3] sequence, first token and number of tokens of each run of up to `block` tokens of a sequence."""
        if block not in self._token_tiles:
            self._wishes.note("token_tiles", block)
            if self.room is not None:
                self._token_tiles[block] = self._fixed("token_tiles", block)
        if block not in self._token_tiles:
            tiles = -(-self.lengths // block)
            sequence, number = group_index(tiles)
            position = number * block
            count = np.minimum(self.lengths[sequence] - position, block)
            table = np.stack([sequence, self.offsets.numpy()[sequence] + position, count], axis=1)
            self._token_tiles[block] = self._carrier.add(table)[0]
        return self._token_tiles[block]

    def check(self, mask: MaskRule | None) -> None:
        """Refuse a mask that does not fit the batch; looked at once, not in every layer."""
        if mask is None or id(mask) in self._checked:
            return
        if isinstance(mask, AttentionMask):
            mask.check(self.lengths)
        else:
            check_attributes(mask, self.lengths)
        self._checked[id(mask)] = mask

    def rule_tiles(self, mask: MaskRule) -> RuleTiles:
        """The batch under any mask, for batched products; made once for all layers."""
        if id(mask) not in self._rule_tiles:
            self._rule_tiles[id(mask)] = (mask, RuleTiles(mask, self.tiles))
        return self._rule_tiles[id(mask)][1]

    def runs(self, mask: AttentionMask) -> SegmentRuns:
        """The batch under a mask of segments, for ways to compute that know no masks; made once for all layers."""
        if self._runs is None or self._runs[0] is not mask:
            self._runs = (mask, SegmentRuns(mask, self.offsets))
        return self._runs[1]

    def buckets(
        self, query_time: Tensor, key_time: Tensor, *, backend: str, mask: MaskRule | None = None
    ) -> Any:
        """Time bucket of every pair as a backend wants it; worked out once for all layers of a batch."""
        # The tensors themselves are the key: kept alive here, so that another cannot take their place unnoticed.
        key = (query_time, key_time, backend, mask)
        for known, kept in self._buckets:
            if all(old is new for old, new in zip(known, key)):
                return kept
        found: Any
        if backend == "tiles":
            tiles = self.tiles if mask is None else self.rule_tiles(mask)
            found = tiles.time_buckets(query_time, key_time)
        elif not kernels_know(mask):
            raise TypeError(f"{backend} knows no mask of type {type(mask).__name__}")
        elif backend == "triton":
            found = time_buckets(self.work, mask, query_time, key_time)
        elif mask is None:
            found = self.loops.buckets(query_time, key_time)
        else:
            runs = self.runs(mask)
            found = runs.loops.buckets(*(x.index_select(0, runs.index) for x in (query_time, key_time)))
        # Two masks at most take turns in a pass.
        self._buckets = [*self._buckets[-1:], (key, found)]
        return found
