"""AttentionSchedule: the tiles of a jagged batch as a list of work for the Triton kernels, longest sequence first.

Tiles of one sequence stand together, so that its keys stay in the cache, and those with most to do come first. All of
it is planned on the CPU from lengths that are known there: nothing waits for the GPU.

A row of the work list:  start of the sequence, its length, number of the tile in it, first number in `pairs`,
end of the full pairs, end of all pairs, tokens before the targets, blocks of bias before the sequence's own
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from freescale.jagged import group_index
from freescale.kernels.attention.mask import AttentionMask, Bools, Ints, shared_position
from freescale.kernels.attention.plan.bias import BiasPlan, joined, padded_plan, plan_bias
from freescale.kernels.attention.plan.fills import ListFiller
from freescale.kernels.attention.plan.room import BIAS_ROWS, LayoutRoom
from freescale.kernels.attention.plan.tile_pairs import TilePairs, TilePlanner
from freescale.kernels.attention.plan.visibility import KeyVisibility, key_visibility
from freescale.kernels.attention.plan.wishes import LayoutWishes, Wish
from freescale.kernels.runtime import Alone, Carrier, Sealed

# From this mean length on, as a token sees it, larger tiles pay.
LONG = 3000

Side = Literal["queries", "keys"]


class WorkList(NamedTuple):
    """Tiles [N, 8] and, under a mask, the numbers of the tiles each one meets."""

    tiles: Tensor
    pairs: Tensor


class Part(NamedTuple):
    """Neighbouring sequences of a batch, worked on together where all of it would take too much room.

    Args:
        tokens: first token and end of the last sequence.
        block: blocks of the bias store before its own; the tiles of a part count blocks from here.
        blocks: how many are its own.
    """

    tokens: tuple[int, int]
    block: int
    blocks: int

    def of_store(self, x: Tensor) -> Tensor:
        """Its own part of something that is laid out like the bias store."""
        begin, size = self.block * BIAS_ROWS**2, self.blocks * BIAS_ROWS**2
        return x if size == x.shape[0] else x[begin : begin + size]


class BiasStore(NamedTuple):
    """Room for one number a pair, in blocks of 128 rows.

    A row is as wide as what its block can see, in whole blocks; where a prefix sees everything, all rows are equally
    wide. So the kernels need no table to find a pair.

    Args:
        blocks: [blocks, 2] where a block starts and how wide its rows are.
        rows: [blocks, 3] start and length of its sequence, and its first row.
        pieces: [pieces, 2] of every square piece the block it is in, and its number there, counted from 1; 0: no piece.
        size: numbers in all.
        widest: the widest row.
    """

    blocks: Tensor
    rows: Tensor
    pieces: Tensor
    size: int
    widest: int


class AttentionSchedule:
    """Plans of one batch, each made when first asked for and then shared by all layers.

    Args:
        offsets: [B + 1] on the CPU.
        device: where the kernels run.
        room: of a padded batch, whose lists without a mask have fixed sizes.
        wishes: told what is asked for.
    """

    def __init__(
        self,
        offsets: Tensor,
        *,
        device: torch.device,
        room: LayoutRoom | None = None,
        wishes: LayoutWishes | None = None,
    ) -> None:
        self._starts: Ints = offsets.numpy().astype(np.int64, copy=False)
        self._lengths = np.diff(self._starts)
        self._device = device
        self.room = room
        self._fixed = None if room is None else ListFiller(self._starts, room)
        self._alone: Carrier = Alone(device)
        self._carrier: Carrier = self._alone
        self._wishes = wishes or LayoutWishes()
        # Stands for a tensor that a kernel does not use.
        self.nothing = torch.empty(16, device=device)
        self._no_pairs = self.nothing.view(torch.int32)
        self.long = is_long(self._lengths) if room is None else room.long
        self._order = np.argsort(-self._lengths, kind="stable")
        self._planned: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
        self._lists: dict[tuple[object, ...], WorkList] = {}
        self._parts: dict[tuple[bool, int], list[Part]] = {}
        self._fixed_parts: list[Part] = []
        self._table_plans: dict[tuple[object, ...], BiasPlan] = {}
        self._stores: dict[bool, BiasStore] = {}
        # By mask: the last layer of a pass may have another one than the others.
        self._visibility: dict[AttentionMask, KeyVisibility] = {}
        self._seen: dict[AttentionMask, Tensor] = {}
        self._shared: dict[AttentionMask, Tensor] = {}
        self._planners: dict[AttentionMask, TilePlanner] = {}

    def tiles(
        self, side: Side, *, block: int, other: int, mask: AttentionMask | None, part: Part | None = None
    ) -> WorkList:
        """Tiles of `block` tokens on one side, of all sequences or of a part; `other` is the other side's tile size."""
        whole = (side, block, other if mask is not None else None, mask)
        key = (*whole, part)
        if key not in self._lists and mask is None:
            wish = self._note("tiles", side, block, other, self._room_of(part))
            if self._has_fixed_size([] if part is None else [part]):
                (fixed,) = self._filled(wish)
                self._lists[key] = WorkList(fixed, self._no_pairs)
        if key not in self._lists:
            if whole not in self._planned:
                self._planned[whole] = (
                    self._plain(side, block) if mask is None else self._masked(side, block, other, mask)
                )
            tiles, pairs = self._planned[whole]
            if part is not None:
                tiles = tiles[_within(tiles, part)] - np.array([0, 0, 0, 0, 0, 0, 0, part.block])
            self._lists[key] = WorkList(*self._carrier.add(tiles, pairs))
        return self._lists[key]

    @cached_property
    def device_offsets(self) -> Tensor:
        """[B + 1] the offsets where the kernels run."""
        wish = self._note("device_offsets")
        return self._carrier.add(self._starts)[0] if self._fixed is None else self._filled(wish)[0]

    def prepare(self, carrier: Carrier) -> None:
        """Make all that layouts before this one were asked for."""
        self._carrier = carrier
        noted = self._wishes.noted()
        kept = any(
            self.parts(None, room=how[2])
            for name, *how in noted
            if name == "table_plan" and how[2] is not None
        )
        for name, *how in noted:
            if name == "tiles":
                side, block, other, room = how
                for part in [None] if room is None else self.parts(None, room=room):
                    self.tiles(side, block=block, other=other, mask=None, part=part)
            elif name == "device_offsets":
                _ = self.device_offsets
            elif name == "bias_store":
                self.bias_store(None)
            elif name == "table_plan":
                rows, columns, room, programs = how
                parts = [] if room is None else self.parts(None, room=room)
                # Where score gradients are kept nobody works them out again, and else nobody reads them: a batch that
                # is too large once must not give a list without a fixed size to all that come after it.
                if parts if kept else room is None:
                    self.table_plan(rows=rows, columns=columns, mask=None, parts=parts, programs=programs)
        self._carrier = self._alone

    def seal(self) -> None:
        """From now on nothing is brought to the device."""
        self._alone = self._carrier = Sealed()

    def _note(self, *wish: object) -> Wish:
        self._wishes.note(*wish)
        return wish

    def _filled(self, wish: Wish) -> tuple[Tensor, ...]:
        """A list of a padded batch on its way to the device."""
        fixed = self._fixed
        assert fixed is not None
        return self._carrier.fill(wish, fixed.shapes(wish), lambda arrays: fixed.fill(wish, arrays))

    def _has_fixed_size(self, parts: list[Part]) -> bool:
        """Whether the size of a list for such parts, or for no part at all, follows from the room of the batch."""
        return self._fixed is not None and all(part in self._fixed_parts for part in parts)

    def _room_of(self, part: Part | None) -> int | None:
        """What room the batch was cut by, so that this is one of its parts."""
        return next((room for (_, room), parts in self._parts.items() if part in parts), None)

    def parts(self, mask: AttentionMask | None, *, room: int) -> list[Part]:
        """The batch in parts of about equal size, of which none takes more than `room` numbers of the bias store.

        No part at all where one sequence alone would take more.
        """
        key = (is_square(mask), room)
        if key not in self._parts:
            self._parts[key] = self._cut(self._store_blocks(mask), room // BIAS_ROWS**2)
        return self._parts[key]

    def _cut(self, blocks: Ints, room: int) -> list[Part]:
        if self.room is not None:
            # One part, as large as it may get, and lists of fixed sizes; where that is too large, none are fixed.
            most = self.room.pairs(len(self._lengths), BIAS_ROWS)
            if 0 < most <= room:
                self._fixed_parts.append(Part((0, int(self._starts[-1]) + 1), 0, most))
                return self._fixed_parts[-1:]
        if not 0 < blocks.max(initial=0) <= room:
            return []
        total = int(blocks.sum())
        goal = total / -(-total // room)
        out, first, before, own = [], 0, 0, 0
        for n, more in enumerate([*blocks.tolist(), room + 1]):
            if own and (own + more > room or own >= goal):
                out.append(Part((int(self._starts[first]), int(self._starts[n])), before, own))
                first, before, own = n, before + own, 0
            own += more
        return out

    def visibility(self, mask: AttentionMask) -> KeyVisibility:
        """What the mask lets tokens see, as the kernels read it; made once."""
        if mask not in self._visibility:
            ends = self._plans(mask).segment_ends() if mask.segments is not None else None
            self._visibility[mask] = key_visibility(
                mask, self._starts, ends, carrier=self._alone, nothing=self.nothing
            )
        return self._visibility[mask]

    def seen_pieces(self, mask: AttentionMask) -> Tensor:
        """[blocks of the bias store, pieces as wide as a block is high] 1 where a mask shows anything of a piece.

        Tiles of the attention kernels never cross a piece, so that the bias of other pieces is never read.
        """
        if mask not in self._seen:
            blocks = self._bias_blocks()
            pairs = self._met(BIAS_ROWS, BIAS_ROWS, mask)
            seen = np.zeros((int(blocks.sum()), int(blocks.max(initial=1))), bool)
            seen[(np.cumsum(blocks) - blocks)[pairs.sequence] + pairs.row, pairs.column] = 1
            self._seen[mask] = self._alone.add(seen)[0].to(torch.uint8)
        return self._seen[mask]

    def shared_positions(self, mask: AttentionMask) -> Tensor:
        """[blocks of the bias store] where the targets of a block's sequence stand."""
        if mask not in self._shared:
            shared = shared_position(mask, self._lengths)
            positions = self._lengths if shared is None else shared
            self._shared[mask] = self._alone.add(np.repeat(positions, self._bias_blocks()))[0]
        return self._shared[mask]

    def bias_store(self, mask: AttentionMask | None) -> BiasStore:
        """Room for the bias of every pair."""
        square = is_square(mask)
        if square not in self._stores and mask is None:
            wish = self._note("bias_store")
            if self._fixed is not None and self.room is not None:
                table, rows, pieces = self._filled(wish)
                widest = -(-self.room.longest // BIAS_ROWS) * BIAS_ROWS
                self._stores[square] = BiasStore(table, rows, pieces, len(pieces) * BIAS_ROWS**2, widest)
        if square not in self._stores:
            blocks = self._bias_blocks()
            sequence, number = group_index(blocks)
            across = blocks[sequence] if square else number + 1
            of, piece = group_index(across)
            widths = across * BIAS_ROWS
            sizes = widths * BIAS_ROWS
            table, rows, pieces = self._carrier.add(
                np.stack([np.cumsum(sizes) - sizes, widths], axis=1),
                np.stack([self._starts[:-1][sequence], self._lengths[sequence], number * BIAS_ROWS], axis=1),
                np.stack([of, piece + 1], axis=1),
            )
            size, widest = int(sizes.sum()), int(widths.max(initial=BIAS_ROWS))
            self._stores[square] = BiasStore(table, rows, pieces, size, widest)
        return self._stores[square]

    def table_plan(
        self, *, rows: int, columns: int, mask: AttentionMask | None, parts: list[Part], programs: int | None
    ) -> BiasPlan:
        """How the bias tables' gradients are summed from every pair of tiles of which something is seen.

        `columns` divides `rows`. About so many `programs` share the tiles, which must be square, or each has its own.
        """
        key = (rows, columns, mask, *parts, programs)
        if key not in self._table_plans and mask is None:
            room = self._room_of(parts[0]) if parts else None
            wish = self._note("table_plan", rows, columns, room, programs)
            if programs is not None and self._has_fixed_size(parts):
                self._table_plans[key] = padded_plan(self._filled(wish), columns=columns)
        if key not in self._table_plans:
            runs = (
                self._pair_tiles(rows, columns, mask)
                if programs is None
                else self._runs(rows, mask, programs)
            )
            part = np.zeros(len(runs), np.int64)
            for n, of in enumerate(parts):
                own = _within(runs, of)
                part[own], runs[own, 7] = n, runs[own, 7] - of.block
            made = plan_bias(runs, part, max(1, len(parts)), wide=rows // columns, columns=columns)
            self._table_plans[key] = made.carried(self._carrier)
        return self._table_plans[key]

    def _plain(self, side: Side, block: int) -> tuple[Ints, Ints]:
        """All tiles in the order of work: queries at the end and keys at the start have most to do."""
        tiles = -(-self._lengths[self._order] // block)
        rank, number = group_index(tiles)
        if side == "queries":
            number = tiles[rank] - 1 - number
        return self._rows(self._order[rank], number, None), np.zeros(1, np.int32)

    def _masked(self, side: Side, block: int, other: int, mask: AttentionMask) -> tuple[Ints, Ints]:
        from freescale.kernels.attention.plan.tile_pair_loops import ordered

        mask.check(self._lengths)
        targets = mask.target_counts(len(self._lengths))
        rows, columns = (block, other) if side == "queries" else (other, block)
        pairs = self._met(rows, columns, mask)
        own, met = (pairs.row, pairs.column) if side == "queries" else (pairs.column, pairs.row)
        tiles = -(-self._lengths // block)
        tile = (np.cumsum(tiles) - tiles)[pairs.sequence] + own
        # By tile, full pairs first; otherwise in the order they come in.
        order, edges = ordered(2 * tile + ~pairs.full, 2 * int(tiles.sum()))
        begin, end = edges[:-1:2], edges[2::2]
        sequence, number = group_index(tiles)
        out = self._rows(sequence, number, mask)
        out[:, 3], out[:, 4], out[:, 5] = begin, edges[1::2], end
        out[:, 6] -= targets[sequence]
        rank = np.empty(len(self._lengths), np.int64)
        rank[self._order] = np.arange(len(rank))
        by_work = np.lexsort((begin - end, rank[sequence]))
        return out[by_work], met[order].astype(np.int32)

    def _rows(self, sequence: Ints, number: Ints, mask: AttentionMask | None) -> Ints:
        out = np.zeros((len(sequence), 8), np.int64)
        out[:, 0] = self._starts[:-1][sequence]
        out[:, 1] = out[:, 6] = self._lengths[sequence]
        out[:, 2] = number
        blocks = self._store_blocks(mask)
        out[:, 7] = (np.cumsum(blocks) - blocks)[sequence]
        return out

    def _store_blocks(self, mask: AttentionMask | None) -> Ints:
        """Square blocks that each sequence has in the bias store."""
        blocks = self._bias_blocks()
        return blocks * blocks if is_square(mask) else blocks * (blocks + 1) // 2

    def _bias_blocks(self) -> Ints:
        return -(-self._lengths // BIAS_ROWS)

    def _met(self, rows: int, columns: int, mask: AttentionMask) -> TilePairs:
        """The pairs of tiles in which a mask shows something; the lists of forward and backward share them."""
        return self._plans(mask).pairs(rows=rows, columns=columns)

    def _plans(self, mask: AttentionMask) -> TilePlanner:
        if mask not in self._planners:
            self._planners[mask] = TilePlanner(mask, self._starts)
        return self._planners[mask]

    def _pair_tiles(self, rows: int, columns: int, mask: AttentionMask | None) -> Ints:
        """A work list of pairs of tiles: its fourth field is the column tile, its fifth 1, the tiles from there on."""
        if mask is None:
            of, number = group_index(-(-self._lengths // rows))
            met = np.minimum(-(-self._lengths[of] // columns), (number + 1) * (rows // columns))
            tile, column = group_index(met)
            return self._pairs(of[tile], number[tile], column, 1, None)
        pairs = self._met(rows, columns, mask)
        return self._pairs(pairs.sequence, pairs.row, pairs.column, 1, mask)

    def _runs(self, size: int, mask: AttentionMask | None, programs: int) -> Ints:
        """The same for square tiles, those that follow each other on a diagonal of a sequence together."""
        if mask is not None:
            tiles = self._pair_tiles(size, size, mask)
            return joined(tiles, size=size, limit=-(-len(tiles) // programs))
        tiles = -(-self._lengths // size)
        limit = max(1, -(-int((tiles * (tiles + 1) // 2).sum()) // programs))
        of, diagonal = group_index(tiles)
        long = tiles[of] - diagonal
        which, number = group_index(-(-long // limit))
        first = number * limit
        counts = np.minimum(limit, long[which] - first)
        return self._pairs(of[which], diagonal[which] + first, first, counts, None)

    def _pairs(
        self, sequence: Ints, row: Ints, column: Ints, count: Ints | int, mask: AttentionMask | None
    ) -> Ints:
        out = self._rows(sequence, row, mask)
        out[:, 3], out[:, 4] = column, count
        if mask is not None:
            out[:, 6] -= mask.target_counts(len(self._lengths))[sequence]
        return out


def is_long(lengths: Ints) -> bool:
    """Whether larger tiles pay: by the mean length as a token sees it, long sequences counted for each of theirs."""
    return bool(np.dot(lengths, lengths) >= LONG * max(1, lengths.sum()))


def is_square(mask: AttentionMask | None) -> bool:
    """Whether some rows see what comes after them, so that the bias store must hold it."""
    return mask is not None and mask.looks_ahead


def has_targets(mask: AttentionMask | None) -> TypeGuard[AttentionMask]:
    """Whether some tokens stand at one position."""
    return mask is not None and mask.targets is not None


def _within(tiles: Ints, part: Part) -> Bools:
    """Which tiles belong to the sequences of a part."""
    found: Bools = (tiles[:, 0] >= part.tokens[0]) & (tiles[:, 0] < part.tokens[1])
    return found
