"""What stands beside attention in an HSTU layer: the projections before it, and the gate and the product after it.

On a GPU the elementwise work is fused and only what cannot be had again cheaply is kept for the backward: of the
projection norm(x) and the numbers before the SiLU, of the gate its two inputs. Elsewhere the plain `reference`.
All of it is bound by memory, so what counts is how often a [T, width] tensor is read or written: u meets its SiLU in
the gate, both ways, and what the layer adds to its input is added by the product itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.kernels.attention import last_dense
from freescale.kernels.dropout import Masked
from freescale.kernels.hstu import reference
from freescale.kernels.hstu.row_programs import FEW, NOTHING_DROPPED, by_rows, mask_numbers, rows_shape
from freescale.kernels.runtime import (
    Later,
    add_product_to,
    can_fuse,
    kernels_of,
    later,
    of_weight,
    product,
    start_kernel,
    weight_gradient,
)

# Blocks of rows a program of the norm's backward adds up: fewer programs would not fill the GPU, more write more sums.
_STEPS = 8


class GradBuffer:
    """Memory for the gradients of u, v, q, k side by side: the gate's backward fills u's, the projection's the others.

    Autograd would hand u's part over as a tensor of its own, to be copied to its place.
    """

    def __init__(self) -> None:
        self._wide: Tensor | None = None

    def for_u(self, u: Tensor) -> Tensor:
        """Where the gradient of u goes."""
        self._wide = u.new_empty(u.shape[0], 4 * u.shape[1])
        return self._wide[:, : u.shape[1]]

    def around(self, du: Tensor) -> Tensor:
        """Memory for all four parts with this gradient of u in it, which most often is there already."""
        wide, self._wide = self._wide, None
        if wide is None or (du.data_ptr(), du.stride()) != (wide.data_ptr(), wide.stride()):
            wide = du.new_empty(du.shape[0], 4 * du.shape[1])
            wide[:, : du.shape[1]] = du
        return wide


class Projected(NamedTuple):
    """What `project_uvqk` makes of a layer's input.

    Args:
        u: before its SiLU, which `gate` applies.
        v: values, q: queries, k: keys, after theirs.
        q: see v.
        k: see v.
        residual: x + bias, to which the layer adds its product.
        room: where the backward of the gate leaves the gradient of u.
    """

    u: Tensor
    v: Tensor
    q: Tensor
    k: Tensor
    residual: Tensor
    room: GradBuffer | None


def project_uvqk(x_TD: Tensor, weight: Tensor, *, bias: Tensor, fused: bool | None = None) -> Projected:
    """u, v, q, k = norm(x) weight, each [T, width] with weight [D, 4 width], SiLU on all but u; and x + bias.

    The gradient of x comes from two sides, through the norm and past it: both are added in one pass, and that pass
    sums up the gradient of the bias, too.

    Args:
        x_TD: states.
        weight: the four projections side by side.
        bias: [D] added to the states that go past the layer.
        fused: use the fused kernels; by default where they can run.
    """
    if can_fuse(x_TD, width=weight.shape[1] // 4) if fused is None else fused:
        room = GradBuffer()
        outputs = Project.apply(x_TD, weight, bias, room, later(weight))  # type: ignore[no-untyped-call]
        u, v, q, k, residual = outputs
        return Projected(u, v, q, k, residual, room)
    return Projected(*reference.project_uvqk(x_TD, weight, bias=bias), None)


def project_targets(x_TD: Tensor, weight: Tensor, rows: Tensor, *, bias: Tensor) -> Projected:
    """The same for a last layer of which only some tokens are wanted: u and x + bias of those, v and k of all.

    q stands at its tokens' places, with zeros for those that are not asked for.

    Args:
        x_TD: states.
        weight: the four projections side by side.
        rows: [K] the tokens that are wanted.
        bias: [D] added to the states that go past the layer.
    """
    normed = reference.plain_norm(x_TD)
    w_u, w_v, w_q, w_k = weight.chunk(4, dim=1)
    v, k = torch.nn.functional.silu(normed @ torch.cat([w_v, w_k], dim=1)).chunk(2, dim=1)
    u, q = (normed.index_select(0, rows) @ torch.cat([w_u, w_q], dim=1)).chunk(2, dim=1)
    q = torch.zeros_like(v).index_copy(0, rows, torch.nn.functional.silu(q))
    return Projected(u, v, q, k, x_TD.index_select(0, rows) + bias.to(x_TD.dtype), None)


def gate(
    proj: Projected, attended_TD: Tensor, *, mask: Masked | None = None, fused: bool | None = None
) -> Tensor:
    """SiLU(u) * norm(attended), of which a mask may drop some; arguments as in `project_uvqk`."""
    if can_fuse(proj.u) if fused is None else fused:
        return GateFunction.apply(proj.u, attended_TD, proj.room or GradBuffer(), mask)  # type: ignore[no-untyped-call]
    return reference.gate(proj.u, attended_TD, mask)


def add_product(proj: Projected, y_TD: Tensor, weight: Tensor, *, fused: bool | None = None) -> Tensor:
    """Residual + y weight^T, the states after the layer; fused, it is written over the residual, needed no more."""
    fused = can_fuse(y_TD) if fused is None else fused
    if fused and proj.residual.dtype == y_TD.dtype:
        return AddProduct.apply(proj.residual, y_TD, weight, later(weight))  # type: ignore[no-untyped-call]
    return reference.add_product(proj.residual, y_TD, weight)


class Project(torch.autograd.Function):
    """SiLU(norm(x) W); keeps norm(x), what its rows were divided by, and the numbers before the SiLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, room: GradBuffer, taker: Later | None = None
    ) -> tuple[Tensor, ...]:
        """U, v, q, k and the residual; `taker` gets the gradient of the weight later."""
        triton_rows = kernels_of("hstu.triton.rows")

        dtype, x = compute_dtype(x), last_dense(x)
        num_rows, device = x.shape[0], x.device
        normed = torch.empty(x.shape, dtype=dtype, device=device)
        residual = torch.empty(x.shape, dtype=x.dtype, device=device)
        rstd = torch.empty(num_rows, dtype=torch.float32, device=device)
        tensors = {"X": x, "Bias": bias, "Out": normed, "Rstd": rstd, "Residual": residual}
        by_rows(triton_rows.norm_kernel, x.shape[1], tensors, {"x_row": x.stride(0)})
        narrow = weight.to(dtype)
        before = product(normed, narrow)
        width = before.shape[1] // 4
        after = before.new_empty(num_rows, 3 * width)
        by_rows(triton_rows.silu_kernel, width, {"X": before, "Out": after}, {})
        ctx.save_for_backward(normed, rstd, narrow, before)
        ctx.room, ctx.dtypes, ctx.taker = room, (x.dtype, weight.dtype, bias.dtype), taker
        return before[:, :width], *after.chunk(3, dim=-1), residual

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, weight and bias."""
        triton_rows = kernels_of("hstu.triton.rows")

        normed, rstd, weight, before = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        parts = [last_dense(grad) for grad in grads[1:4]]
        d_before = ctx.room.around(grads[0])
        by_rows(
            triton_rows.silu_backward_kernel,
            before.shape[1] // 4,
            {"X": before, **dict(zip("ABC", parts)), "Out": d_before},
            {f"{name}_row": part.stride(0) for name, part in zip("abc", parts)},
        )
        d_weight = of_weight(
            ctx.taker,
            lambda: weight_gradient(normed, d_before),
            *(normed, d_before),
            dtype=weight_dtype,
        )
        d_normed = product(d_before, weight.t())
        dx = torch.empty(normed.shape, dtype=x_dtype, device=normed.device)
        tensors = {"Y": normed, "Rstd": rstd, "DY": d_normed, "Residual": grads[4].contiguous(), "DX": dx}
        d_bias = _norm_backward(tensors, normed.shape[1])
        return dx, d_weight, d_bias.to(bias_dtype), None, None

    backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]


class GateFunction(torch.autograd.Function):
    """SiLU(u) * norm(a), masked; keeps u, a and the keys of the mask, which is drawn again in the backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, attended: Tensor, room: GradBuffer, mask: Masked | None) -> Tensor:
        """The gated states."""
        triton_rows = kernels_of("hstu.triton.rows")

        u, attended = last_dense(u), last_dense(attended)
        out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0)}
        # Where nothing is dropped no key is read; something must stand there.
        keys, site, constants = (u, 0, NOTHING_DROPPED) if mask is None else mask_numbers(mask)
        tensors = {"U": u, "A": attended, "Keys": keys, "Out": out}
        by_rows(triton_rows.gate_kernel, u.shape[1], tensors, {**strides, **constants}, site=site)
        ctx.save_for_backward(u, attended, keys)
        ctx.room, ctx.dropped = room, (site, constants)
        return out

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Of u and a."""
        triton_rows = kernels_of("hstu.triton.rows")

        u, attended, keys = ctx.saved_tensors
        site, constants = ctx.dropped
        du = ctx.room.for_u(u)
        da = torch.empty(attended.shape, dtype=attended.dtype, device=attended.device)
        tensors = {"U": u, "A": attended, "DOut": grad.contiguous(), "Keys": keys, "DU": du, "DA": da}
        strides = {"u_row": u.stride(0), "a_row": attended.stride(0), "du_row": du.stride(0), **constants}
        by_rows(triton_rows.gate_backward_kernel, u.shape[1], tensors, strides, numbers=FEW, site=site)
        return du, da, None, None

    backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]


class AddProduct(torch.autograd.Function):
    """x += y W^T in one product: apart, the sum would read and write all states again (73 us a layer of 105 MB)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, taker: Later | None = None) -> Tensor:
        """X, written over; `taker` gets the gradient of the weight later."""
        narrow = weight.to(y.dtype)
        add_product_to(x, y, narrow.t())
        ctx.mark_dirty(x)
        ctx.save_for_backward(y, narrow)
        ctx.dtype, ctx.taker = weight.dtype, taker
        return x

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Of x, y and the weight."""
        y, weight = ctx.saved_tensors
        dtype = ctx.dtype
        d_weight = of_weight(ctx.taker, lambda: weight_gradient(grad, y), grad, y, dtype=dtype)
        return grad, product(grad, weight), d_weight, None

    backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]


def _norm_backward(tensors: dict[str, Tensor], width: int) -> Tensor:
    """Start the backward of the norm; the sum over all rows of the gradient past it, in a fixed order."""
    triton_rows = kernels_of("hstu.triton.rows")

    num_rows = tensors["Y"].shape[0]
    shape = rows_shape(width, FEW)
    num_programs = -(-num_rows // (shape["ROWS"] * _STEPS))
    sums = tensors["Rstd"].new_empty(num_programs, width)
    start_kernel(
        triton_rows.norm_backward_kernel,
        (num_programs,),
        {**tensors, "Sums": sums},
        {"num_rows": num_rows},
        {**shape, "STEPS": _STEPS},
    )
    return sums.sum(0)


def compute_dtype(x: Tensor) -> torch.dtype:
    """What products of x are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
