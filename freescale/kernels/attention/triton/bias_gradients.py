"""TableGradients: the gradients of the position and the time table on the GPU.

The backward of the keys has the score gradient of every pair and head. Where they fit, part by part of the batch, it
keeps them in memory, and queries and tables read them from there: no product is computed twice. Where the score
gradients of one sequence alone do not fit, they are worked out again, tile by tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.kernels.attention.plan.bias import CHUNK, BiasPlan, SumStep, bucket_rows
from freescale.kernels.attention.plan.room import BIAS_ROWS
from freescale.kernels.attention.plan.schedule import Part, is_square
from freescale.kernels.attention.triton.launch import Launch, Tile
from freescale.kernels.attention.triton.pair_bias import BiasTables
from freescale.kernels.runtime import kernels_of, start_kernel

# Bytes that kept score gradients may take; 0 works them out again always.
SCORE_BYTES = 2**30
# Heads wider than the first and up to the second: there two products take longer than a score gradient written and read
# (6 % of forward and backward on an H200). Narrower ones were not tried; wider ones want other tiles.
KEPT_WIDTHS = (64, 128)
# Tiles of kept score gradients, and about how many programs share them: enough for every warp of a large GPU several
# times over, few enough that adding up their sums is a small matter.
_KEPT_TILE, _KEPT_PROGRAMS = Tile(32, 32, 1, 1), 8192
# Under a mask every tile is looked at while planning: 118 ms of CPU time for 32 sequences of 4,096 in tiles of 32.
_KEPT_MASKED_TILE = Tile(64, 64, 4, 1)
# Tiles where they are worked out again, by the bytes of a head's row: all four operands must fit into shared memory.
_HALF_TILES = {
    128: Tile(64, 64, 4, 3, True),
    256: Tile(64, 64, 4, 1, True),
    512: Tile(64, 64, 8, 1, True),
}
# Four warps, or larger tiles, spill: up to 24 KB a thread. At the widest, products in and outside the tensor cores
# need different ones.
_TF32_TILES = {256: Tile(64, 64, 8, 1), 2048: Tile(64, 32, 8, 1)}
_EXACT_TILES = {256: Tile(64, 64, 8, 1), 512: Tile(64, 32, 8, 1), 2048: Tile(32, 32, 8, 1)}


def score_parts(launch: Launch, tables: BiasTables) -> list[Part]:
    """The parts of the batch whose score gradients are kept at a time; none where they are not wanted or do not fit."""
    if not tables and not _pays(launch):
        return []
    room = SCORE_BYTES // (launch.q.dtype.itemsize * launch.q.shape[1])
    return launch.work.parts(launch.mask, room=room)


def most_kept_blocks(*, heads: int, itemsize: int) -> int:
    """Pairs of blocks whose score gradients are kept at a time; lists of padded batches of more have no fixed size."""
    return SCORE_BYTES // (itemsize * heads * BIAS_ROWS**2)


def keeps_scores(*, width: int, itemsize: int) -> bool:
    """Whether queries had better read score gradients than work them out again, though no table wants them."""
    above, most = KEPT_WIDTHS
    return itemsize == 2 and above < width <= most


def _pays(launch: Launch) -> bool:
    width = max(launch.q.shape[-1], launch.v.shape[-1])
    return launch.mask is None and keeps_scores(width=width, itemsize=launch.q.dtype.itemsize)


def score_room(launch: Launch, parts: list[Part]) -> Tensor:
    """Room for the score gradients of the largest part, in the type that products read them in."""
    most = max((part.blocks for part in parts), default=0) * BIAS_ROWS**2
    return launch.q.new_empty(most * launch.q.shape[1]) if parts else launch.nothing


class TableGradients:
    """Adds up the gradients of both tables, one part of the batch at a time.

    Args:
        launch: the attention call.
        tables: the tables; there is at least one.
        parts: the parts whose score gradients are kept; none if they are worked out again.
    """

    def __init__(self, launch: Launch, tables: BiasTables, parts: list[Part]) -> None:
        self._launch, self._tables, self._parts = launch, tables, parts
        kept = _KEPT_TILE if launch.mask is None else _KEPT_MASKED_TILE
        self._tile = kept if parts else _recomputing_tile(launch)
        self._plan = launch.work.table_plan(
            rows=self._tile.queries,
            columns=self._tile.keys,
            mask=launch.mask,
            parts=parts,
            programs=_KEPT_PROGRAMS if parts else None,
        )
        rows = self._tile.queries // self._tile.keys + 1 + bucket_rows(self._tile.keys)
        self._sums = launch.q.new_empty(
            self._plan.runs.shape[0], rows * self._tile.keys, dtype=launch.sums_dtype
        )

    def add_kept(self, number: int, scores: Tensor) -> None:
        """Add a part, from its score gradients."""
        kept_gradient_kernel = kernels_of("attention.triton.kept_scores").kept_gradient_kernel

        begin, end = self._plan.part_runs[number], self._plan.part_runs[number + 1]
        self._start(kept_gradient_kernel, begin, end, {}, {"Scores": scores}, self._parts[number])

    def add_again(self, pairs: Tensor, grad: Tensor) -> None:
        """Add the whole batch; score gradients are worked out again from the bias of all pairs and the output's."""
        table_gradient_kernel = kernels_of("attention.triton.bias_gradient_kernels").table_gradient_kernel

        launch = self._launch
        read = {"Q": launch.q, "K": launch.k, "V": launch.v, "DO": grad}
        self._start(table_gradient_kernel, 0, self._plan.runs.shape[0], read, {"Bias": pairs}, None)

    def _start(
        self,
        kernel: object,
        begin: int,
        end: int,
        read: dict[str, Tensor],
        more: dict[str, Tensor],
        part: Part | None,
    ) -> None:
        launch, tables = self._launch, self._tables
        buckets = launch.nothing if tables.buckets is None else tables.buckets
        if part is not None and tables.buckets is not None:
            buckets = part.of_store(buckets)
        sums, runs = self._sums, self._plan.runs
        if begin:
            sums, runs = sums[begin:], runs[begin:]
        launch.start(
            kernel,
            end - begin,
            self._tile,
            read=read,
            write={},
            more={**more, "Sums": sums, "Buckets": buckets, "Runs": runs},
            numbers={},
            options={
                "HAS_POSITION": tables.position is not None,
                "HAS_TIME": tables.time is not None,
                "BUCKET_ROWS": bucket_rows(self._tile.keys),
            },
        )

    def result(self, *, factor: float) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the position and the time table; `factor` is what score gradients are multiplied with."""
        tables, plan = self._tables, self._plan
        columns, timed = self._tile.keys, tables.time is not None
        chunks = plan.groups.order.shape[0] if timed else plan.num_chunks
        groups = plan.groups.starts.shape[0] - 1 if timed else plan.num_groups
        parts = _group_sums(self._sums.view(-1, columns), plan.chunks, chunks)
        sums = _group_sums(parts, plan.groups, groups).mul_(factor)
        # One after the other: weights by rising distance, then by bucket.
        flat = sums.view(-1)
        d_position = d_time = None
        if tables.position is not None:
            ahead = is_square(self._launch.mask)
            d_position = _by_position(flat, plan, columns, tables.position, ahead=ahead)
        if tables.time is not None:
            begin = plan.num_groups * columns
            d_time = flat[begin : begin + tables.time.shape[0]].to(tables.time.dtype)
        return d_position, d_time


def _recomputing_tile(launch: Launch) -> Tile:
    width = max(launch.q.shape[-1], launch.v.shape[-1])
    itemsize = launch.q.dtype.itemsize
    single = _TF32_TILES if launch.precision == "tf32" else _EXACT_TILES
    tiles = _HALF_TILES if itemsize == 2 else single
    return next(of for limit, of in tiles.items() if width * itemsize <= limit)


def _group_sums(rows: Tensor, step: SumStep, groups: int) -> Tensor:
    """Sum of the rows of each group."""
    group_sum_kernel = kernels_of("attention.triton.bias_gradient_kernels").group_sum_kernel

    out = rows.new_empty(groups, rows.shape[1])
    start_kernel(
        group_sum_kernel,
        (groups,),
        {"X": rows, "Order": step.order, "Starts": step.starts, "Out": out},
        {},
        {"COLUMNS": rows.shape[1], "ROWS": CHUNK, "num_warps": 4},
    )
    return out


def _by_position(sums: Tensor, plan: BiasPlan, columns: int, table: Tensor, *, ahead: bool) -> Tensor:
    """What the table's weights get of sums by rising distance; keys seen `ahead` of their query count as distance 0."""
    zero = columns - 1 - plan.first_group * columns
    distances = table.shape[0]
    known = min(distances, plan.num_groups * columns - zero)
    out = torch.constant_pad_nd(sums[zero : zero + known], (0, distances - known)).to(table.dtype)
    if ahead:
        out[0] += sums[:zero].sum().to(table.dtype)
    return out
