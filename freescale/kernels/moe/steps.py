"""An expert MLP as eight steps, and the one autograd function that orders them: what is kept, what is made again.

R = L * K rows grouped by expert (see `moe_routing`), width D, hidden width N (twice that before SwiGLU):

    forward    hidden    [R, 2N]  w_in x of every row's token         activated  [R, N]
               rows      [R, D]   w_out activated                     combine    [L, D] weighted sum over the K rows
    backward   d_hidden  [R, 2N]  over `hidden` itself, with weight * activated and the weights' own gradient
               d_w_out, d_w_in    products over an expert's rows
               d_rows    [R, D]   w_in^T d_hidden                     combine    [L, D] sum over the K rows

The gradient of a weight is <w_out^T d_out, activated> of its row, so the rows after w_out need not be kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from freescale.errors import FreeScaleError
from freescale.kernels.moe.routing import TILE_ROWS, Routing, tile_list
from freescale.kernels.runtime import Later, of_weight

Activation = Literal["swiglu", "silu", "relu2"]
Save = Literal["preact", "input", "all"]
# Numbers in the rows of a chunk below which the products of "input" lose speed; and the most chunks: each adds to all
# gradients of the weights, which four of them made 7 % of the time of a large layer.
CHUNK_NUMBERS, MAX_CHUNKS = 2**26, 2


class Routed:
    """Rows of tokens in the order of the experts: the values and which of them, copied only if a step asks for it."""

    def __init__(self, values: Tensor, tokens: Tensor, copy: Tensor | None = None) -> None:
        self.values, self.tokens, self._copy = values, tokens, copy

    def copied(self, steps: Steps) -> Tensor:
        """[rows, D], made once."""
        if self._copy is None:
            self._copy = steps.gather(self.values, self.tokens)
        return self._copy


@dataclass
class Span:
    """A range of rows, and where each expert's rows stand in it."""

    routing: Routing
    start: int
    stop: int
    offsets: Tensor  # [E + 1] int32, from 0 to stop - start
    _tiles: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The token of every row of the span."""
        return self.routing.tokens[self.start : self.stop]

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return self.stop - self.start == len(self.routing.tokens)

    @property
    def tiles(self) -> Tensor:
        """The list of row tiles (see `tile_list`), made once."""
        if self._tiles is None:
            self._tiles = tile_list(self.offsets, self.stop - self.start)
        return self._tiles


class Steps(Protocol):
    """One way to compute the steps; `span` says which rows, all tensors [rows, ...] hold just these."""

    def gather(self, values: Tensor, tokens: Tensor) -> Tensor:
        """values[tokens]."""

    def hidden(self, x: Routed, w_in: Tensor, span: Span) -> Tensor:
        """The hidden numbers, before the activation."""

    def activated(self, x: Routed, w_in: Tensor, span: Span, *, keep: bool) -> tuple[Tensor | None, Tensor]:
        """The hidden numbers before the activation, if they are to be kept, and after it."""

    def rows(self, activated: Tensor, w_out: Tensor, span: Span) -> Tensor:
        """The experts' outputs [rows, D]."""

    def combine(self, rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        """[L, D]: sum over a token's rows, weighted or not."""

    def d_hidden(
        self, grad: Routed, w_out: Tensor, hidden: Tensor, weights_R: Tensor, span: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        """d_hidden, written over `hidden`; weight * activated; the gradient of the weight of every row."""

    def d_w_out(self, grad: Routed, scaled: Tensor, span: Span, into: Tensor | None) -> Tensor:
        """[E, D, N]; zeros for an expert without rows. Added to `into` where that is given."""

    def d_w_in(self, d_hidden: Tensor, x: Routed, span: Span, into: Tensor | None) -> Tensor:
        """[E, N or 2N, D], likewise."""

    def d_rows(self, d_hidden: Tensor, w_in: Tensor, span: Span) -> Tensor:
        """[rows, D]: gradients of the rows' inputs."""


Takers = tuple[Later | None, Later | None]
"""Who gets the gradients of w_in and w_out later."""


def run_experts(
    steps: Steps,
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    w_in: Tensor,
    w_out: Tensor,
    *,
    save: Save,
    takers: Takers = (None, None),
) -> Tensor:
    """The whole layer by these steps."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, w_in, w_out))):
        save = "input"
    return _Experts.apply(x, weights, w_in, w_out, *routing, steps, save, takers)  # type: ignore[no-untyped-call]


class _Experts(torch.autograd.Function):
    """Keeps x, weights and index tensors; "preact" also the hidden numbers, "all" these and the routed x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        tokens: Tensor,
        places: Tensor,
        offsets: Tensor,
        steps: Steps,
        save: Save,
        takers: Takers,
    ) -> Tensor:
        routing = Routing(tokens, places, offsets)
        rows, kept = _Rows(), list[Tensor]()
        for span in _spans(routing, x.shape[1], chunked=save == "input"):
            source = Routed(x, span.tokens)
            hidden, activated = steps.activated(source, w_in, span, keep=save != "input")
            if hidden is not None:
                kept = [hidden] if save == "preact" else [hidden, source.copied(steps)]
            del hidden, source
            rows.put(span, steps.rows(activated, w_out, span))
            del activated
        ctx.save_for_backward(x, weights, w_in, w_out, *routing, *kept)
        ctx.steps, ctx.save, ctx.spent, ctx.takers = steps, save, False, takers
        return steps.combine(rows.all(), places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Span by span; only the gradients of the rows [R, D] are there for all of them at once."""
        _once(ctx)
        x, weights, w_in, w_out, *rest = ctx.saved_tensors
        routing, kept, steps = Routing(*rest[:3]), rest[3:], ctx.steps
        wants_x, _, wants_in, wants_out = ctx.needs_input_grad[:4]
        grad, flat = grad.contiguous(), routing.places.view(-1).long()
        weights_R = torch.empty_like(weights).view(-1).scatter_(0, flat, weights.reshape(-1))
        d_weights_R, rows = _Rows(), _Rows()
        d_w_in = d_w_out = None
        for span in _spans(routing, x.shape[1], chunked=ctx.save == "input"):
            source = Routed(x, span.tokens, kept[1] if ctx.save == "all" else None)
            hidden = kept[0] if kept else steps.hidden(source, w_in, span)
            hidden = hidden.clone() if ctx.save == "all" else hidden
            routed = Routed(grad, span.tokens)
            part = weights_R[span.start : span.stop]
            hidden, scaled, d_part = steps.d_hidden(routed, w_out, hidden, part, span)
            d_weights_R.put(span, d_part)
            # Several spans are there to keep little: theirs are not put off.
            for_in, for_out = ctx.takers if span.whole else (None, None)
            if wants_out:
                made = partial(steps.d_w_out, routed, scaled, span, d_w_out)
                d_w_out = of_weight(for_out, made, grad, scaled)
                del made
            del scaled, routed
            if wants_in:
                made = partial(steps.d_w_in, hidden, source, span, d_w_in)
                d_w_in = of_weight(for_in, made, x, hidden)
                del made
            del source
            if wants_x:
                rows.put(span, steps.d_rows(hidden, w_in, span))
            del hidden
        dx = steps.combine(rows.all(), routing.places, None) if wants_x else None
        d_weights = d_weights_R.all()[flat].view(weights.shape).to(weights.dtype)
        return dx, d_weights, d_w_in, d_w_out, *(None,) * 6


class _Rows:
    """Puts what spans give side by side; the only span's result is taken as it is."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def put(self, span: Span, made: Tensor) -> None:
        """Take the rows of this span."""
        if span.whole:
            self._rows = made
            return
        if self._rows is None:
            self._rows = made.new_empty(len(span.routing.tokens), *made.shape[1:])
        self._rows[span.start : span.stop] = made

    def all(self) -> Tensor:
        """All rows."""
        assert self._rows is not None
        return self._rows


def _spans(routing: Routing, width: int, *, chunked: bool) -> list[Span]:
    """All rows at once, or cut into chunks of about equal size, which the host knows without asking the device."""
    num_rows = len(routing.tokens)
    chunks = min(MAX_CHUNKS, max(1, num_rows * width // CHUNK_NUMBERS)) if chunked else 1
    if chunks == 1:
        return [Span(routing, 0, num_rows, routing.offsets)]
    edges = [num_rows * n // chunks // TILE_ROWS * TILE_ROWS for n in range(chunks)] + [num_rows]
    return [Span(routing, a, b, (routing.offsets - a).clamp(0, b - a)) for a, b in itertools.pairwise(edges)]


def _once(ctx: Any) -> None:
    """Refuse a second backward where the first has written over what was kept."""
    if ctx.spent and ctx.save == "preact":
        raise FreeScaleError(
            "the backward of an expert layer ran a second time",
            got='save="preact", which writes gradients over what the forward kept',
            allowed='save="all" or save="input" with retain_graph=True',
            next_step='pass save="all", or run the forward again',
        )
    ctx.spent = True
