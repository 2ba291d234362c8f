"""What stands beside attention in an HSTU layer: project(x) = SiLU(norm(x) W) in four parts, and gate = u * norm(a).

On a GPU the elementwise work is fused and only what cannot be had again cheaply is kept for the backward: of the
projection its input and the numbers before the SiLU, of the gate its two inputs. Elsewhere plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention import has_triton
from freescale.kernels.attention_launch import last_dense, start_kernel

EPS = 1e-6
_MAX_WIDTH = 4096


def plain_norm(x: Tensor) -> Tensor:
    """LayerNorm without parameters."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=EPS)


def project_uvqk(
    x_TD: Tensor, weight: Tensor, *, fused: bool | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """u, v, q, k = SiLU(norm(x) weight), each [T, width] with weight [D, 4 width]; and x, for what is added to it.

    The gradient of x comes from two sides, through the norm and past it. Handed out here, both are added in one pass.

    Args:
        x_TD: states.
        weight: the four projections side by side.
        fused: use the fused kernels; by default where they can run.
    """
    if _can_fuse(x_TD, weight.shape[1] // 4) if fused is None else fused:
        return _Project.apply(x_TD, weight)  # type: ignore[no-untyped-call]
    u, v, q, k = torch.nn.functional.silu(plain_norm(x_TD) @ weight).chunk(4, dim=-1)
    return u, v, q, k, x_TD


def gate(u_TD: Tensor, attended_TD: Tensor, *, fused: bool | None = None) -> Tensor:
    """U * norm(attended); arguments as in `project_uvqk`."""
    if _can_fuse(u_TD, u_TD.shape[1]) if fused is None else fused:
        return _Gate.apply(u_TD, attended_TD)  # type: ignore[no-untyped-call]
    return u_TD * plain_norm(attended_TD)


def _can_fuse(x: Tensor, width: int) -> bool:
    wide = max(width, x.shape[-1]) <= _MAX_WIDTH and x.dtype != torch.float64
    return x.device.type == "cuda" and wide and len(x) > 0 and has_triton()


class _Project(torch.autograd.Function):
    """SiLU(norm(x) W); keeps x and the numbers before the SiLU, makes norm(x) again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        from freescale.kernels import triton_rows

        dtype = _compute_dtype(x)
        x = last_dense(x)
        with torch.autocast(x.device.type, enabled=False):
            before = _norm(x, dtype) @ weight.to(dtype)
        after = torch.empty_like(before)
        _by_rows(triton_rows.silu_kernel, before.shape[1], {"X": before, "Out": after}, {})
        ctx.save_for_backward(x, weight, before)
        return *after.chunk(4, dim=-1), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from freescale.kernels import triton_rows

        x, weight, before = ctx.saved_tensors
        parts = [last_dense(grad) for grad in grads[:4]]
        d_before = torch.empty_like(before)
        _by_rows(
            triton_rows.silu_backward_kernel,
            before.shape[1] // 4,
            {"X": before, **dict(zip("ABCD", parts)), "Out": d_before},
            {f"{name}_row": part.stride(0) for name, part in zip("abcd", parts)},
        )
        with torch.autocast(x.device.type, enabled=False):
            d_weight = _norm(x, before.dtype).t() @ d_before
            d_normed = d_before @ weight.to(before.dtype).t()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tensors = {"X": x, "DY": d_normed, "Past": grads[4].contiguous(), "DX": dx}
        _by_rows(triton_rows.norm_backward_kernel, x.shape[1], tensors, {"x_row": x.stride(0)})
        return dx, d_weight.to(weight.dtype)


class _Gate(torch.autograd.Function):
    """u * norm(a); keeps u and a."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, attended: Tensor) -> Tensor:
        from freescale.kernels import triton_rows

        u, attended = last_dense(u), last_dense(attended)
        out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0)}
        _by_rows(triton_rows.gate_kernel, u.shape[1], {"U": u, "A": attended, "Out": out}, strides)
        ctx.save_for_backward(u, attended)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        from freescale.kernels import triton_rows

        u, attended = ctx.saved_tensors
        du, da = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, attended))
        tensors = {"U": u, "A": attended, "DOut": grad.contiguous(), "DU": du, "DA": da}
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0)}
        _by_rows(triton_rows.gate_backward_kernel, u.shape[1], tensors, strides)
        return du, da


def _norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    from freescale.kernels import triton_rows

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _by_rows(triton_rows.norm_kernel, x.shape[1], {"X": x, "Out": out}, {"x_row": x.stride(0)})
    return out


def _by_rows(kernel: Any, width: int, tensors: dict[str, Tensor], strides: dict[str, int]) -> None:
    """Start a kernel over all rows, about 4,096 numbers a program."""
    num_rows = len(next(iter(tensors.values())))
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, 4096 // block)
    shape = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4 if block <= 1024 else 8}
    start_kernel(kernel, (-(-num_rows // rows),), tensors, {"num_rows": num_rows}, {**strides, **shape})


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
