"""Dropout whose masks follow from keys: compiled loops on the CPU, one kernel each way on a GPU, else the reference.

No mask is kept for the backward: it costs less to find it again than to write and read it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from freescale.kernels.attention import SequenceLayout, last_dense
from freescale.kernels.dropout import reference
from freescale.kernels.dropout.reference import key_of_step as key_of_step
from freescale.kernels.runtime import CachedLauncher, has_triton, kernels_of, start_kernel

_COMPILED = (torch.float32, torch.float64)
_BLOCK_TOKENS = 64
_NUMBERS = 4096
"""Numbers a program of the kernel works on."""
_MAX_BLOCK = 1024


class Masked(NamedTuple):
    """One mask, drawn when it is used.

    Args:
        keys: [N] int64 keys of the rows.
        site: number of the place in the model.
        threshold: hashes below it fall, in 2^-32.
        scale: what is kept grows by it.
    """

    keys: Tensor
    site: int
    threshold: int
    scale: float


def masked(keys_N: Tensor, *, p: float, site: int) -> Masked:
    """The mask that drops a share 0 <= p < 1 at a site."""
    return Masked(keys_N.contiguous(), site, *_constants(p))


@cache
def _constants(p: float) -> tuple[int, float]:
    return min(round(p * 2**32), 2**32 - 1), 1 / (1 - p)


def token_keys(step: Tensor, samples_B: Tensor, layout: SequenceLayout) -> Tensor:
    """[T] int64 keys of the tokens of a batch; nothing here waits for a GPU.

    Args:
        step: [1] int64 key of the step, where the batch is.
        samples_B: int64, what names each sample in the step: its row in the data set.
        layout: where the samples stand. Tokens that belong to none, behind the last one, get any key.
    """
    out = torch.empty(layout.num_tokens, dtype=torch.int64, device=step.device)
    if not len(out):
        return out
    if step.is_cuda and has_triton():
        tiles = layout.token_tiles(_BLOCK_TOKENS)
        tensors = {"Step": step, "Samples": samples_B.contiguous(), "Tiles": tiles}
        tensors |= {"Offsets": layout.device_offsets, "Out": out}
        kernel = kernels_of("dropout.triton.masks").token_keys_kernel
        start_kernel(kernel, (tiles.shape[0],), tensors, {}, {"BLOCK": _BLOCK_TOKENS, "num_warps": 1})
        return out
    if step.device.type != "cpu":
        starts = layout.device_offsets
        samples = torch.repeat_interleave(samples_B, starts.diff(), output_size=layout.num_tokens)
        return reference.keys(step, samples, layout.positions)
    from freescale.kernels.dropout import loops

    key = int(step) % 2**64
    loops.token_keys(key, samples_B.contiguous().numpy(), layout.offsets.numpy(), out.numpy())
    return out


def sample_keys(step: Tensor, samples_B: Tensor) -> Tensor:
    """[B] keys of whole samples, for one row a sample."""
    return reference.keys(step, samples_B, -1)


def padded_keys(step: Tensor, samples_B: Tensor, longest: int) -> Tensor:
    """[B, longest] keys of tokens that were padded to one length; those of tokens are `token_keys`'."""
    positions = torch.arange(longest, device=samples_B.device)
    return reference.keys(step, samples_B[:, None], positions)


def dropout(x: Tensor, mask: Masked) -> Tensor:
    """X [N, ...] where the mask keeps it, scaled, else 0; differentiable.

    Args:
        x: one row a key; the numbers of a row are its columns, whatever its shape.
        mask: of `masked`.
    """
    return cast(Tensor, _Dropout.apply(x, mask.keys, *mask[1:]))  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """The backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, *mask: Any) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.mask = mask
        return _dropped(x, Masked(keys, *mask))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        # Another node of the graph only where there will be one: it costs 10 us.
        call = _Dropout.apply if torch.is_grad_enabled() else _dropped_by
        return call(grads[0], keys, *ctx.mask), *(None,) * 4


def _dropped_by(x: Tensor, keys: Tensor, *mask: Any) -> Tensor:
    return _dropped(x, Masked(keys, *mask))


def _dropped(x: Tensor, mask: Masked) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    if x.is_cuda and has_triton():
        return _by_kernel(x, mask)
    if x.device.type != "cpu" or x.dtype not in _COMPILED:
        return reference.dropout(x, *mask)
    from freescale.kernels.dropout import loops

    out = torch.empty(x.shape, dtype=x.dtype)
    flat = x.detach().contiguous().view(len(x), -1)
    keys, site, threshold, scale = mask
    loops.dropout(flat.numpy(), keys.numpy(), out.view(flat.shape).numpy(), threshold, scale, site)
    return out


def _by_kernel(x: Tensor, mask: Masked) -> Tensor:
    flat = last_dense(x if x.dim() == 2 else x.reshape(len(x), -1))
    num_rows, width = flat.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, rows, launcher = _prepared(width, flat.stride(0), mask.threshold, mask.scale)
    grid = -(-num_rows // rows), -(-width // block)
    launcher.start(grid, (flat, mask.keys, out), (num_rows, mask.site))
    return out


@cache
def _prepared(width: int, x_row: int, threshold: int, scale: float) -> tuple[int, int, CachedLauncher]:
    """Columns and rows a program works on, and the kernel compiled for them."""
    block = min(_MAX_BLOCK, max(16, 1 << (width - 1).bit_length()))
    rows = max(1, _NUMBERS // block)
    constants: dict[str, Any] = {"x_row": x_row, "WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4}
    constants |= {"THRESHOLD": threshold, "SCALE": scale}
    kernel = kernels_of("dropout.triton.masks").dropout_kernel
    return block, rows, CachedLauncher(kernel, ("X", "Keys", "Out"), ("num_rows", "site"), constants)
