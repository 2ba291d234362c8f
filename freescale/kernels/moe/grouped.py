"""The steps of an expert MLP on torch's grouped products, everything between them in fused Triton kernels.

torch's grouped product reads the offsets on the device, so nothing waits for the host. It wants its rows in the order
of the experts: x and the gradient are copied so for a moment (a quarter of the hidden numbers where the hidden width
is four times the width), and again where they are needed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.kernels.moe.steps import Activation, Routed, Span
from freescale.kernels.runtime import has_triton, start_kernel

# Numbers one program of a row kernel works on, and columns at once: eight 16-byte reads a thread in flight.
NUMBERS, COLUMNS = 4096, 1024


def why_not_grouped(x: Tensor, w_in: Tensor, w_out: Tensor) -> str | None:
    """The reason why torch's grouped products cannot run these, if there is one."""
    if not has_triton():
        return "it needs the triton package for the steps between the products"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if {x.dtype, w_in.dtype, w_out.dtype} != {x.dtype}:
        return f"its operands must have one type, not {x.dtype}, {w_in.dtype} and {w_out.dtype}"
    if x.device.type == "cuda" and x.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16 on a GPU, not {x.dtype}"
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "torch's grouped product needs compute capability 9.0 or newer"
    widths = (x.shape[1], w_in.shape[1], w_out.shape[2])
    if any(width * x.element_size() % 16 for width in widths):
        return f"rows must be a multiple of 16 bytes, and the widths are {widths}"
    return None


class GroupedSteps:
    """Products by torch, the rest by Triton.

    Args:
        activation: "swiglu", "silu" or "relu2".
    """

    def __init__(self, activation: Activation) -> None:
        self.activation = activation
        self._parts = 2 if activation == "swiglu" else 1
        self._shape: dict[str, Any] = {"ACTIVATION": activation, "PARTS": self._parts}

    def gather(self, values: Tensor, tokens: Tensor) -> Tensor:
        """values[tokens]."""
        from freescale.kernels.moe.triton.rows import gather_kernel

        out = values.new_empty(len(tokens), values.shape[1])
        _by_rows(gather_kernel, out, {"Values": values, "Tokens": tokens, "Out": out})
        return out

    def hidden(self, x: Routed, w_in: Tensor, span: Span) -> Tensor:
        """Before the activation."""
        return F.grouped_mm(x.copied(self), w_in.transpose(1, 2), offs=span.offsets[1:])

    def activated(self, x: Routed, w_in: Tensor, span: Span, *, keep: bool) -> tuple[Tensor | None, Tensor]:
        """Before and after the activation."""
        from freescale.kernels.moe.triton.rows import activate_kernel

        hidden = self.hidden(x, w_in, span)
        out = hidden.new_empty(len(hidden), hidden.shape[1] // self._parts)
        _by_rows(activate_kernel, out, {"Hidden": hidden, "Out": out}, **self._shape)
        return hidden if keep else None, out

    def rows(self, activated: Tensor, w_out: Tensor, span: Span) -> Tensor:
        """The experts' outputs."""
        return F.grouped_mm(activated, w_out.transpose(1, 2), offs=span.offsets[1:])

    def combine(self, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over a token's rows, in the order of its choices."""
        from freescale.kernels.moe.triton.rows import combine_kernel

        out = rows.new_empty(len(places), rows.shape[1])
        tensors = {
            "Rows": rows,
            "Places": places,
            "Weights": places if weights is None else weights,
            "Out": out,
        }
        _by_rows(combine_kernel, out, tensors, CHOICES=places.shape[1], WEIGHTED=weights is not None)
        return out

    def d_hidden(
        self, grad: Routed, w_out: Tensor, hidden: Tensor, weights_R: Tensor, span: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Through the activation, all in place: gradients over `hidden`, weight * activated over its gradient."""
        from freescale.kernels.moe.triton.rows import activate_backward_kernel

        d_activated = F.grouped_mm(grad.copied(self), w_out, offs=span.offsets[1:])
        d_weights = torch.empty_like(weights_R)
        tensors = {"Hidden": hidden, "DActivated": d_activated, "Weights": weights_R, "DWeights": d_weights}
        _by_rows(activate_backward_kernel, d_activated, tensors, whole_rows=True, **self._shape)
        return hidden, d_activated, d_weights

    def d_w_out(self, grad: Routed, scaled: Tensor, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        return self._over_rows(grad.copied(self), scaled, span, into)

    def d_w_in(self, d_hidden: Tensor, x: Routed, span: Span, into: Tensor | None) -> Tensor:
        """Products over an expert's rows."""
        return self._over_rows(d_hidden, x.copied(self), span, into)

    def d_rows(self, d_hidden: Tensor, w_in: Tensor, span: Span) -> Tensor:
        """Gradients of the rows' inputs."""
        return F.grouped_mm(d_hidden, w_in, offs=span.offsets[1:])

    def _over_rows(self, left: Tensor, right: Tensor, span: Span, into: Tensor | None) -> Tensor:
        """[E, M, N]: left^T right; experts without rows are made sure to be zero whatever torch leaves there."""
        from freescale.kernels.moe.triton.rows import store_kernel

        part = F.grouped_mm(left.t(), right, offs=span.offsets[1:])
        total, size = part if into is None else into, part[0].numel()
        tensors = {"Offsets": span.offsets, "Total": total, "Part": part}
        constants = {"SIZE": size, "BLOCK": NUMBERS, "ADD": into is not None, "num_warps": 4}
        start_kernel(store_kernel, (len(part), -(-size // NUMBERS)), tensors, {}, constants)
        return total


def _by_rows(
    kernel: Any, like: Tensor, tensors: dict[str, Tensor], *, whole_rows: bool = False, **constants: Any
) -> None:
    """Start a kernel over [rows, columns] tiles of `like`, or over whole rows of it."""
    num_rows, width = like.shape
    block = min(COLUMNS, max(16, 1 << (width - 1).bit_length()))
    rows = max(1, (NUMBERS // 2 if whole_rows else NUMBERS) // block)
    grid = (-(-num_rows // rows), 1 if whole_rows else -(-width // block))
    shape = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 4}
    start_kernel(kernel, grid, tensors, {"num_rows": num_rows}, {**constants, **shape})
