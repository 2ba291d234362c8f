"""The layer of DLRMv4: norms with weights, SiLU on u alone, and [u, a, u * norm(a)] back to the width of the states.

    u, v, q, k = norm(x) W + b          a = attention(q, k, v)          x + dropout([SiLU(u), a, SiLU(u) * norm(a)]) O^T

On a GPU it is one function of autograd made of three kernels and four products. Weights of the norm before the product
are multiplied into W, which is small; gradients of W and of the norm follow from that of their product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention import MAX_WIDTH, FusedAttention, last_dense, tiles_for, token_room
from freescale.kernels.dropout import Masked
from freescale.kernels.hstu import reference
from freescale.kernels.hstu.kept_parts import KeptPart, given_back
from freescale.kernels.hstu.parts import AddProduct, compute_dtype
from freescale.kernels.hstu.row_programs import FEW, NOTHING_DROPPED, by_rows, mask_numbers, rows_shape
from freescale.kernels.hstu.weights import STUWeights, WholeBatch
from freescale.kernels.runtime import can_fuse, kernels_of, product, start_kernel, weight_gradient

# Blocks of rows a program of the gate's backward adds up, and numbers in a block. Of twelve shapes the best on an H200:
# 684,000 rows of 512 take 1.76 ms with 2 warps of a row each; 4 warps take 2.65.
_STEPS = 16
_PAIR = 1024


def stu_project(
    x_TD: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, *, fused: bool | None = None
) -> Tensor:
    """Norm(x) weight + bias, [T, N] with weight [D, N].

    Args:
        x_TD: states.
        norm: [D] weight of the norm.
        norm_bias: [D] its bias.
        weight: of the product.
        bias: [N] its bias.
        fused: use the fused kernels; by default where they can run.
    """
    if can_fuse(x_TD) if fused is None else fused:
        return _NormProject.apply(x_TD, norm, norm_bias, weight, bias)  # type: ignore[no-untyped-call]
    return reference.stu_project(x_TD, norm, norm_bias, weight, bias)


def can_fuse_stu(x_TD: Tensor, *, heads: int) -> bool:
    """Whether a layer over these states can be one function."""
    return x_TD.shape[1] // heads <= MAX_WIDTH and can_fuse(x_TD) and compute_dtype(x_TD) == x_TD.dtype


def fused_stu_layer(
    x_TD: Tensor,
    weights: STUWeights,
    batch: WholeBatch,
    *,
    heads: int,
    alpha: float,
    scale: float,
    dropped: Masked | None = None,
) -> Tensor:
    """States after the layer, as its parts compute them, by fused kernels.

    Args:
        x_TD: states.
        weights: of the layer.
        batch: where sequences stand, and what tokens see.
        heads: of the attention.
        alpha: multiplies the scores before their SiLU.
        scale: multiplies them after it.
        dropped: mask of what goes into the last product.
    """
    batch.layout.check(batch.mask)
    return _Layer.apply(x_TD, *weights, batch, heads, alpha, scale, dropped)  # type: ignore[no-untyped-call]


def fused_stu_targets(
    x_TD: Tensor,
    index_K: Tensor,
    weights: STUWeights,
    batch: WholeBatch,
    *,
    heads: int,
    alpha: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """u, attended values and states of some tokens, [K, D] each: what a last layer needs that is wanted for them alone.

    Keys and values are of all tokens, u and queries of these. Arguments as in `fused_stu_layer`, and:

    Args:
        x_TD: states.
        index_K: the tokens, each once.
        weights: of the layer.
        batch: with a mask under which all others see nothing.
        heads: of the attention.
        alpha: multiplies the scores before their SiLU.
        scale: multiplies them after it.
    """
    batch.layout.check(batch.mask)
    found = _OfTargets.apply(x_TD, index_K, *weights[:4], batch, heads, alpha, scale)  # type: ignore[no-untyped-call]
    u, attended, own = found
    return u, attended, own


class _NormProject(torch.autograd.Function):
    """Norm(x) W + b; keeps the norm without its weights, and what its rows were divided by."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, past: bool = False
    ) -> Any:
        """The product; with `past`, a copy of x beside it."""
        kernels = kernels_of("hstu.triton.stu")
        dtype, x = compute_dtype(x), last_dense(x)
        normed = torch.empty(x.shape, dtype=dtype, device=x.device)
        rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
        residual = torch.empty(x.shape, dtype=x.dtype, device=x.device) if past else normed
        tensors = {"X": x, "Out": normed, "Rstd": rstd, "Residual": residual}
        by_rows(kernels.norm_kernel, x.shape[1], tensors, {"x_row": x.stride(0), "RESIDUAL": past})
        narrow = (norm[:, None] * weight).to(dtype)
        added = torch.addmv(bias, weight.t(), norm_bias).to(dtype)
        out = torch.addmm(added, normed, narrow, out=normed.new_empty(len(x), weight.shape[1]))
        ctx.save_for_backward(normed, rstd, narrow, norm, norm_bias, weight)
        ctx.dtype = x.dtype
        return (out, residual) if past else out

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, past: Tensor | None = None) -> tuple[Tensor, ...]:
        """Of x, norm, norm_bias, weight and bias."""
        kernels = kernels_of("hstu.triton.stu")
        normed, rstd, narrow, norm, norm_bias, weight = ctx.saved_tensors
        grad = grad.contiguous()
        d_narrow = weight_gradient(normed, grad).to(weight.dtype)
        d_bias = grad.sum(0, dtype=torch.float32).to(weight.dtype)
        d_normed = product(grad, narrow.t())
        dx = torch.empty(normed.shape, dtype=ctx.dtype, device=normed.device)
        residual = normed if past is None else past.contiguous()
        tensors = {"Y": normed, "Rstd": rstd, "DY": d_normed, "Residual": residual, "DX": dx}
        options = {"RESIDUAL": past is not None}
        by_rows(kernels.norm_backward_kernel, normed.shape[1], tensors, options, numbers=FEW)
        return dx, *_through_product(d_narrow, d_bias, norm, norm_bias, weight)

    backward = staticmethod(once_differentiable(lambda ctx, grad: (*_NormProject.gradients(ctx, grad), None)))  # type: ignore[assignment]


def _through_product(
    d_narrow: Tensor, d_bias: Tensor, norm: Tensor, norm_bias: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of norm, norm_bias, weight and bias from those of norm * weight and of what is added."""
    d_weight = torch.addr(norm[:, None] * d_narrow, norm_bias, d_bias)
    return (d_narrow * weight).sum(1), weight @ d_bias, d_weight, d_bias


class _Gate:
    """The gate and its gradients; keeps u, a and the keys of the mask, which is drawn again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, attended: Tensor, weight: Tensor, bias: Tensor, mask: Masked | None
    ) -> Tensor:
        kernels = kernels_of("hstu.triton.stu")
        out = u.new_empty(len(u), 3 * u.shape[1])
        # Where nothing is dropped no key is read; something must stand there.
        keys, site, constants = (u, 0, NOTHING_DROPPED) if mask is None else mask_numbers(mask)
        tensors = {"U": u, "A": attended, "Weight": weight, "Bias": bias, "Keys": keys, "Out": out}
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0)}
        num_rows, shape = len(u), _gate_shape(u.shape[1])
        grid = (-(-num_rows // shape["ROWS"]),)
        numbers = {"num_rows": num_rows, "site": site}
        start_kernel(kernels.gate_kernel, grid, tensors, numbers, {**shape, **strides, **constants})
        ctx.save_for_backward(u, attended, keys, weight, bias)
        ctx.dropped = site, constants
        return out

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, du: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of a, weight and bias; that of u is written to `du`."""
        kernels = kernels_of("hstu.triton.stu")
        u, attended, keys, weight, bias = ctx.saved_tensors
        site, constants = ctx.dropped
        width = u.shape[1]
        da = torch.empty(attended.shape, dtype=attended.dtype, device=attended.device)
        shape = _gate_shape(width)
        programs = -(-len(u) // (shape["ROWS"] * _STEPS))
        sums = torch.empty(programs, 2, width, dtype=torch.float32, device=u.device)
        tensors = {"U": u, "A": attended, "Weight": weight, "Bias": bias, "DOut": grad.contiguous()}
        tensors |= {"Keys": keys, "DU": du, "DA": da, "Sums": sums}
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0), "du_row": du.stride(0)}
        start_kernel(
            kernels.gate_backward_kernel,
            (programs,),
            tensors,
            {"num_rows": len(u), "site": site},
            {**shape, "STEPS": _STEPS, **strides, **constants},
        )
        d_weight, d_bias = sums.sum(0)
        return da, d_weight.to(weight.dtype), d_bias.to(bias.dtype)


def _gate_shape(width: int) -> dict[str, int]:
    """Rows a program of the gate has, and warps for them: 16 numbers a thread."""
    shape = rows_shape(width, _PAIR)
    return {**shape, "num_warps": max(1, shape["ROWS"] * shape["BLOCK"] // 512)}


class _Layer(torch.autograd.Function):
    """The parts one after the other, and their gradients in reverse."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor,
        uvqk: Tensor,
        uvqk_bias: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor,
        output: Tensor,
        batch: WholeBatch,
        heads: int,
        alpha: float,
        scale: float,
        dropped: Masked | None,
    ) -> Tensor:
        project, attention, gate, last = parts = [KeptPart() for _ in range(4)]
        wide, residual = _NormProject.forward(project, x, norm, norm_bias, uvqk, uvqk_bias, past=True)
        u, *vqk = wide.chunk(4, dim=1)
        v, q, k = (part.unflatten(1, (heads, -1)) for part in vqk)
        work = batch.layout.work
        attended = FusedAttention.forward(
            attention, q, k, v, None, None, None, work, batch.mask, alpha, scale,
            tiles_for(q.shape[2], q.dtype, long=work.long, biased=False),
        )  # fmt: skip
        y = _Gate.forward(gate, u, attended.flatten(1), gate_weight, gate_bias, dropped)
        out = AddProduct.forward(last, residual, y, output)
        # Handed over to autograd, which lets go of them when the gradients are done.
        ctx.save_for_backward(*[tensor for part in parts for tensor in part.saved_tensors])
        ctx.counts = [len(part.saved_tensors) for part in parts]
        for part in parts:
            part.saved_tensors = ()
        ctx.parts, ctx.work = parts, work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        project, attention, gate, last = given_back(ctx)
        grad = grad.contiguous()
        _, dy, d_output, _ = AddProduct.gradients(last, grad)
        u = gate.saved_tensors[0]
        # Gradients of u, v, q and k are written side by side, as the product takes them; those of pads stay 0.
        wide = token_room(u, len(u), 4 * u.shape[1], work=ctx.work)
        du, *vqk = wide.chunk(4, dim=1)
        da, d_gate, d_gate_bias = _Gate.gradients(gate, dy, du)
        heads = attention.saved_tensors[0].shape[1]
        dv, dq, dk = (part.unflatten(1, (heads, -1)) for part in vqk)
        FusedAttention.gradients(attention, da.unflatten(1, (heads, -1)), (dq, dk, dv))
        dx, d_norm, d_norm_bias, d_uvqk, d_uvqk_bias = _NormProject.gradients(project, wide, grad)
        return (
            dx, d_norm, d_norm_bias, d_uvqk, d_uvqk_bias, d_gate, d_gate_bias, d_output, *(None,) * 5,
        )  # fmt: skip


class _OfTargets(torch.autograd.Function):
    """Projections and attention where few tokens are wanted.

    By parts, keys and values would get gradients of their own that are copied side by side, and states two of all
    tokens that are added up, one of them nearly all zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        norm: Tensor,
        norm_bias: Tensor,
        uvqk: Tensor,
        uvqk_bias: Tensor,
        batch: WholeBatch,
        heads: int,
        alpha: float,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels = kernels_of("hstu.triton.stu")
        dtype, x = compute_dtype(x), last_dense(x)
        normed = torch.empty(x.shape, dtype=dtype, device=x.device)
        rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
        tensors = {"X": x, "Out": normed, "Rstd": rstd, "Residual": normed}
        by_rows(kernels.norm_kernel, x.shape[1], tensors, {"x_row": x.stride(0), "RESIDUAL": False})
        of_own, of_all = _own_and_all((norm[:, None] * uvqk).to(dtype))
        own_added, all_added = _own_and_all(torch.addmv(uvqk_bias, uvqk.t(), norm_bias).to(dtype))
        picked = normed.index_select(0, index)
        u, q_own = torch.addmm(own_added, picked, of_own).chunk(2, dim=1)
        vk = torch.addmm(all_added, normed, of_all).chunk(2, dim=1)
        q = torch.zeros_like(normed).index_copy_(0, index, q_own)
        v, k, q = (part.unflatten(1, (heads, -1)) for part in (*vk, q))
        attention, work = KeptPart(), batch.layout.work
        attended = FusedAttention.forward(
            attention, q, k, v, None, None, None, work, batch.mask, alpha, scale,
            tiles_for(q.shape[2], q.dtype, long=work.long, biased=False),
        )  # fmt: skip
        saved = (index, normed, rstd, picked, of_own, of_all, norm, norm_bias, uvqk)
        ctx.save_for_backward(*attention.saved_tensors, *saved)
        ctx.parts, ctx.counts = [attention], [len(attention.saved_tensors)]
        attention.saved_tensors = ()
        ctx.heads, ctx.work, ctx.dtype = heads, work, x.dtype
        return u.contiguous(), attended.flatten(1).index_select(0, index), x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor, da: Tensor, d_own: Tensor) -> tuple[Tensor | None, ...]:
        kernels = kernels_of("hstu.triton.stu")
        (attention,) = given_back(ctx)
        index, normed, rstd, picked, of_own, of_all, norm, norm_bias, weight = ctx.saved_tensors[-9:]
        width, heads = normed.shape[1], ctx.heads
        d_attended = torch.zeros_like(normed).index_copy_(0, index, da.to(normed.dtype))
        # Gradients of v and k are written side by side, as the product takes them; those of pads stay 0.
        wide, dq = (token_room(normed, len(normed), each * width, work=ctx.work) for each in (2, 1))
        dv, dk = (part.unflatten(1, (heads, -1)) for part in wide.chunk(2, dim=1))
        FusedAttention.gradients(
            attention, d_attended.unflatten(1, (heads, -1)), (dq.unflatten(1, (heads, -1)), dk, dv)
        )
        d_uq = torch.cat([du.to(normed.dtype), dq.index_select(0, index)], dim=1)
        both = weight_gradient(picked, d_uq), weight_gradient(normed, wide)
        d_narrow = _in_order(*both).to(weight.dtype)
        d_bias = _in_order(*(each.sum(0, dtype=torch.float32) for each in (d_uq, wide))).to(weight.dtype)
        d_normed = product(wide, of_all.t())
        d_normed.index_add_(0, index, product(d_uq, of_own.t()))
        dx = torch.empty(normed.shape, dtype=ctx.dtype, device=normed.device)
        tensors = {"Y": normed, "Rstd": rstd, "DY": d_normed, "Residual": normed, "DX": dx}
        by_rows(kernels.norm_backward_kernel, width, tensors, {"RESIDUAL": False}, numbers=FEW)
        dx.index_add_(0, index, d_own.to(dx.dtype))
        return dx, None, *_through_product(d_narrow, d_bias, norm, norm_bias, weight), *(None,) * 4


def _own_and_all(uvqk: Tensor) -> tuple[Tensor, Tensor]:
    """What is of some tokens alone, u and q, and what is of all, v and k, of four parts side by side."""
    u, v, q, k = uvqk.chunk(4, dim=-1)
    return torch.cat([u, q], dim=-1), torch.cat([v, k], dim=-1)


def _in_order(of_own: Tensor, of_all: Tensor) -> Tensor:
    """Back from `_own_and_all`."""
    (u, q), (v, k) = of_own.chunk(2, dim=-1), of_all.chunk(2, dim=-1)
    return torch.cat([u, v, q, k], dim=-1)
