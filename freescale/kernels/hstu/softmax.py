"""Sampled softmax: every token's next item against the negatives of its sequence.

In plain PyTorch each step of it (unit length, products, masks, log-sum) passes all states through memory again; fused,
they are read twice in the forward and twice in the backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from freescale.kernels.attention import SequenceLayout, clear_pads, token_room
from freescale.kernels.hstu.reference import unit
from freescale.kernels.rows import sum_gradients
from freescale.kernels.runtime import can_fuse, product_precision, start_kernel

_NEVER = -5e4
_BLOCK_TOKENS = 64
_ROOMY = 200 << 10


class _Tile(NamedTuple):
    """How many negatives, columns and tokens a program has at once, and what it is compiled for."""

    negatives: int = 128
    columns: int = 64
    tokens: int = _BLOCK_TOKENS
    warps: int = 8
    stages: int = 3


class _Tiles(NamedTuple):
    """Of the three kernels: losses, gradients of states, of negatives.

    The first two go by tiles of the layout, and have its number of tokens.
    """

    loss: _Tile
    states: _Tile
    negatives: _Tile


_HALF = _Tiles(_Tile(), _Tile(stages=1), _Tile(columns=256, tokens=32))
"""Best of 12, 12 and 36 on an H200 with 102k tokens of width 512 and 128 negatives."""

_FULL = _Tiles(
    _Tile(columns=32, warps=4),
    _Tile(negatives=64, warps=4),
    _Tile(columns=64, tokens=16, warps=4),
)
"""Products in three parts: best of 8, 18 and 24 with 14k tokens of width 128 and 512 negatives."""


def sampled_softmax(
    states_TD: Tensor,
    rows_UD: Tensor,
    target_T: Tensor,
    negative_BN: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float,
    normalize: bool,
    fused: bool | None = None,
) -> Tensor:
    """Sum over tokens of -log softmax(next item against negatives); a negative that is the target does not count.

    Args:
        states_TD: one state a token; it may be of half precision beside rows of full.
        rows_UD: the unique item vectors of the batch.
        target_T: index in `rows_UD` of each token's next item.
        negative_BN: indices in `rows_UD` of each sequence's negatives.
        layout: where the sequences stand.
        temperature: divides the logits.
        normalize: compare directions (cosine) instead of plain dot products.
        fused: use the fused kernels; by default where they can run.
    """
    if can_fuse(states_TD) if fused is None else fused:
        return _SampledSoftmax.apply(  # type: ignore[no-untyped-call]
            states_TD, rows_UD, target_T, negative_BN, layout, 1 / temperature, normalize
        )
    states = (
        unit(states_TD) if normalize else states_TD.to(torch.promote_types(states_TD.dtype, rows_UD.dtype))
    )
    # Normalising the unique rows once is cheaper than normalising every occurrence.
    rows = (unit(rows_UD) if normalize else rows_UD).to(states.dtype)
    positive = (states * F.embedding(target_T, rows)).sum(-1, keepdim=True)
    tiles = layout.tiles
    # Negatives are shared inside a sequence, so whole tiles meet them at once.
    slots = negative_BN.index_select(0, tiles.tile_sequence)
    against = tiles.to_tokens(tiles.to_tiles(states) @ _transposed(F.embedding(slots, rows)))
    hit = tiles.to_tokens(tiles.to_tiles(target_T)[:, :, None] == slots[:, None, :])
    logits = torch.cat([positive, against.masked_fill(hit, _NEVER)], dim=1) / temperature
    losses = logits.logsumexp(-1) - logits[:, 0]
    return (losses[: layout.num_real] if layout.padded else losses).sum()


def _transposed(x: Tensor) -> Tensor:
    """[n, a, b] -> [n, b, a]; on a CPU laid out anew, which its small batched products want (8 times faster on Arm)."""
    turned = x.transpose(1, 2)
    return turned.contiguous() if x.device.type == "cpu" else turned


class _SampledSoftmax(torch.autograd.Function):
    """The fused form; keeps states, rows, the logits, and three numbers a token."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        rows: Tensor,
        target: Tensor,
        negative: Tensor,
        layout: SequenceLayout,
        beta: float,
        normalize: bool,
    ) -> Tensor:
        from freescale.kernels.hstu.triton import softmax as kernels

        states, rows = states.contiguous(), rows.contiguous()
        target, negative = target.int(), negative.int()
        sums = torch.float64 if states.dtype == torch.float64 else torch.float32
        num_tokens, num_negatives = states.shape[0], negative.shape[1]
        row_scale = rows.new_empty(rows.shape[0], dtype=sums)
        if normalize:
            _over_rows(kernels.row_scale_kernel, {"X": rows, "Scale": row_scale})
        totals, state_scale, positives = (states.new_empty(num_tokens, dtype=sums) for _ in range(3))
        # Tiles leave pads out: they have no loss, and no gradient.
        losses = (states.new_zeros if layout.padded else states.new_empty)(num_tokens, dtype=sums)
        logits = states.new_empty(num_tokens, num_negatives, dtype=sums)
        tensors = {
            "States": states,
            "Rows": rows,
            "RowScale": row_scale,
            "Targets": target,
            "Negatives": negative,
            "Tiles": layout.token_tiles(_BLOCK_TOKENS),
            "Logits": logits,
            "Totals": totals,
            "StateScale": state_scale,
            "Positives": positives,
        }
        loss_shape, *shapes = _shapes(states, num_negatives, normalize)
        grid, given = (tensors["Tiles"].shape[0],), {**tensors, "Losses": losses}
        start_kernel(kernels.loss_kernel, grid, given, {"beta": beta}, loss_shape)
        ctx.save_for_backward(*tensors.values())
        ctx.names, ctx.shapes, ctx.beta, ctx.layout = tuple(tensors), shapes, beta, layout
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from freescale.kernels.hstu.triton import softmax as kernels

        tensors = dict(zip(ctx.names, ctx.saved_tensors))
        states, rows, negative = tensors["States"], tensors["Rows"], tensors["Negatives"]
        num_tokens, width = states.shape
        d_states = token_room(states, *states.shape, work=ctx.layout.work)
        # Of every target, then of every negative: the gradient it gives to its row at unit length.
        d_units = states.new_empty(num_tokens + negative.numel(), width, dtype=tensors["Logits"].dtype)
        # Pads name a row; what it gets may be multiplied further.
        clear_pads(d_units[:num_tokens], ctx.layout.work)
        given = {**tensors, "DLoss": grad, "DStates": d_states, "DUnits": d_units}
        grid, (of_states, of_negatives) = (tensors["Tiles"].shape[0],), ctx.shapes
        start_kernel(kernels.state_gradient_kernel, grid, given, {"beta": ctx.beta}, of_states)
        blocks = -(-negative.shape[1] // of_negatives["BLOCK_N"]) * -(-width // of_negatives["BLOCK_D"])
        given = {name: tensors[name] for name in ("States", "Logits", "Totals", "StateScale")}
        given |= {"Sequences": ctx.layout.by_length.sequence, "Offsets": ctx.layout.device_offsets}
        given |= {"DLoss": grad, "DUnits": d_units}
        numbers = {"beta": ctx.beta, "num_tokens": num_tokens}
        grid = (negative.shape[0] * blocks,)
        start_kernel(kernels.negative_gradient_kernel, grid, given, numbers, of_negatives)
        index = torch.cat([tensors["Targets"], negative.flatten()])
        d_rows = sum_gradients(d_units, index, rows.shape[0])
        if of_states["UNIT"]:
            unit_rows, d_rows = d_rows, torch.empty_like(rows)
            scaled = {"X": rows, "Scale": tensors["RowScale"], "DUnit": unit_rows, "DX": d_rows}
            _over_rows(kernels.row_gradient_kernel, scaled)
        return d_states, d_rows.to(rows.dtype), None, None, None, None, None


def _shapes(states: Tensor, num_negatives: int, normalize: bool) -> list[dict[str, Any]]:
    """What each kernel is compiled for. Products in half precision under autocast, as everywhere in the model."""
    kind, width = states.device.type, states.shape[1]
    dot = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    precision = product_precision(dot)
    return [
        {
            "NEGATIVES": num_negatives,
            "WIDTH": width,
            "BLOCK_T": tile.tokens,
            "BLOCK_N": min(tile.negatives, max(16, 1 << (num_negatives - 1).bit_length())),
            "BLOCK_D": min(tile.columns, max(16, 1 << (width - 1).bit_length())),
            "UNIT": normalize,
            "DOT": dot,
            "PRECISION": precision,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        for tile in _tiles_of(dot, precision, states.device)
    ]


def _tiles_of(dot: torch.dtype, precision: str, device: torch.device) -> _Tiles:
    if _is_roomy(device):
        if dot.itemsize == 2:
            return _HALF
        if precision == "tf32x3":
            return _FULL
    # What wants least. In float64, and in three parts, 64 columns run out of registers.
    usual = _Tile(columns=64 if precision == "tf32" or dot.itemsize == 2 else 32)
    return _Tiles(usual, usual, usual)


@cache
def _is_roomy(device: torch.device) -> bool:
    """Whether a program has as much memory to share as on the GPU that the shapes were chosen on."""
    if device.type != "cuda":
        return True  # interpreted
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"]) >= _ROOMY


def _over_rows(kernel: Any, tensors: dict[str, Tensor]) -> None:
    """Start a kernel over all rows of X, about 4,096 numbers a program."""
    num_rows, width = tensors["X"].shape
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, 4096 // block)
    shape = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4 if block <= 1024 else 8}
    start_kernel(kernel, (-(-num_rows // rows),), tensors, {"num_rows": num_rows}, shape)
