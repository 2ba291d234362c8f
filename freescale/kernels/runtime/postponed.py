"""PostponedGradients: gradients of weights that wait until there is time for them.

In a backward only the gradients of inputs are on the way down to the rows. That of a weight, x^T grad, feeds nothing
but its own update. So it can be put off: what it is made of is kept, and it is computed while rows travel.

    loss ──> inputs' gradients, layer by layer ──> gradients of rows, which leave
                    └ x, grad kept                     └ x^T grad of every layer, meanwhile

Exact: the same products of the same numbers, added in the same order. What is kept takes memory, so there is a bound:
beyond it gradients are computed at once, and so is one that would take most of it alone. Those of bias tables are made
of a number a pair of tokens and head; in a large padded batch these take three times the memory of all that the
products of their layer need, for half of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_LARGEST = 0.5
"""Of the bound, what one gradient may take."""
_LEAST = 1 << 26
"""Bytes; a lower bound puts off next to nothing."""


class PostponedGradients:
    """Gradients of weights that a backward has left to be computed.

    Args:
        most_bytes: what inputs and gradients that are kept for them may take; `wanted_bytes` is what it was at first.
            `num_without_room` counts those that did not fit, beside `num_postponed`.

    `share` of what could be kept is: 1 postpones everything, 0 nothing; top layers, whose turn comes first, go before
    others. What could be kept is known from the backward before.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = self.wanted_bytes = most_bytes
        self.share = 1.0
        self.kept_bytes = 0
        self._could_bytes = 0
        self._could_before: int | None = None
        self.most_kept_bytes = 0
        self.num_postponed = 0
        self.num_without_room = 0
        self._waiting: dict[Tensor, list[_Use]] = {}
        self._kept: set[int] = set()

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Forward and backward of this thread inside: whatever can wait is put off."""
        before, _here.taker = _here.taker, self
        try:
            yield
        finally:
            _here.taker = before

    def add(
        self, weight: Tensor, gradient: Callable[[], Tensor], *kept: Tensor, cast_once: bool = False
    ) -> None:
        """Compute a gradient later, from tensors that are kept for it; at once where they are too large.

        It may be of a narrower type than the weight, which autograd would leave it in behind a cast: one for every use
        of the weight, or for all of them together where it was cast once (as autocast does it).
        """
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, kept)}
        num_bytes = sum(size for place, size in storages.items() if place not in self._kept)
        too_large = num_bytes > _LARGEST * self.most_bytes
        self._could_bytes += 0 if too_large else num_bytes
        self.num_without_room += too_large or self.kept_bytes + num_bytes > self.most_bytes
        if too_large or self.kept_bytes + num_bytes > self._bound():
            done = gradient()
            gradient = lambda: done  # noqa: E731
        else:
            self._kept.update(storages)
            self.kept_bytes += num_bytes
            self.most_kept_bytes = max(self.most_kept_bytes, self.kept_bytes)
            self.num_postponed += 1
        self._waiting.setdefault(weight, []).append(_Use(gradient, cast_once))

    def keep_less(self) -> bool:
        """Three quarters of what was kept so far, from now on; False where that was nothing."""
        if not self.most_kept_bytes:
            return False
        less = self.most_kept_bytes * 3 // 4
        self.most_bytes = less if less >= _LEAST else 0
        self.most_kept_bytes = self.num_postponed = self.num_without_room = 0
        return True

    @property
    def waiting(self) -> list[Tensor]:
        """Weights whose gradients are not there yet."""
        return list(self._waiting)

    def compute(self, done: Callable[[Tensor], None] = lambda weight: None) -> None:
        """Compute all that is left; `done` is told every weight whose gradient is complete."""
        for weight in self.each():
            done(weight)

    def each(self, places: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Iterator[Tensor]:
        """Compute what is left, weight by weight, last come first: the next forward begins with the lowest layers.

        Gradients are added to `.grad`; where there is none, they go to the weight's place in `places`, if it has one.
        """
        waiting = self._waiting
        self.forget()
        while waiting:
            weight, uses = waiting.popitem()
            with torch.no_grad():
                # As autograd does it: all uses of this backward first, then what earlier ones have left. A product in
                # half precision is made wide on its way, not by a kernel of its own.
                several = len(uses) > 1
                total = uses.pop(0).compute(weight, wide=several)
                while uses:
                    total = total + uses.pop(0).compute(weight, wide=True)
                if weight.grad is not None:
                    weight.grad += total
                elif weight in places:
                    places[weight].copy_(total)
                else:
                    weight.grad = total.to(weight.dtype)
            yield weight

    def forget(self) -> None:
        """Nothing is left to compute."""
        self._waiting = {}
        self._kept, self.kept_bytes = set(), 0
        self._could_bytes, self._could_before = 0, self._could_bytes

    def _bound(self) -> float:
        if self.share >= 1 or self._could_before is None:
            return self.most_bytes if self.share > 0 else 0
        return min(self.most_bytes, self.share * self._could_before)


class _Use(NamedTuple):
    """A gradient that one use of a weight gives; `cast_once`: the weight was made narrow for all uses together."""

    gradient: Callable[[], Tensor]
    cast_once: bool

    def compute(self, weight: Tensor, *, wide: bool) -> Tensor:
        """Compute it; `wide`: ready to be added to those of other uses."""
        found = self.gradient()
        return found.to(weight.dtype) if wide and not self.cast_once else found


class _Here(threading.local):
    taker: PostponedGradients | None = None


_here = _Here()


class Later:
    """Where the gradient of one weight goes.

    Args:
        taker: computes it when there is time.
        weight: whose.
    """

    def __init__(self, taker: PostponedGradients, weight: Tensor) -> None:
        self._taker, self._weight = taker, weight

    def add(self, gradient: Callable[[], Tensor], *kept: Tensor, cast_once: bool = False) -> None:
        """As in `PostponedGradients`."""
        self._taker.add(self._weight, gradient, *kept, cast_once=cast_once)


def later(weight: Tensor | None) -> Later | None:
    """Who takes the gradient of a weight in the backward of what is computed now; None: autograd, as always."""
    taker = _here.taker
    if taker is None or weight is None or not torch.is_grad_enabled():
        return None
    if not (weight.requires_grad and weight.is_leaf):
        return None
    # Hooks want to see the gradient when autograd has it.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    return Later(taker, weight)


def of_weight(
    taker: Later | None, gradient: Callable[[], Tensor], *kept: Tensor, dtype: torch.dtype | None = None
) -> Tensor | None:
    """For a backward: the gradient of a weight, in this type if it is given, or None where it comes later."""
    if taker is None:
        return gradient() if dtype is None else gradient().to(dtype)
    taker.add(gradient, *kept)
    return None


def of_weights(
    gradients: Callable[[], Sequence[Tensor | None]],
    weights: Sequence[Tensor | None],
    takers: Sequence[Later | None],
    *kept: Tensor,
) -> Sequence[Tensor | None]:
    """The same for several weights whose gradients are worked out together: all of them now, or all later."""
    if any(weight is not None and taker is None for weight, taker in zip(weights, takers)):
        return gradients()
    once = cache(gradients)

    def of_one(number: int) -> Tensor:
        gradient = once()[number]
        assert gradient is not None
        return gradient

    for number, taker in enumerate(takers):
        if taker is not None:
            taker.add(partial(of_one, number), *kept)
    return [None] * len(weights)


def linear(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose weight and bias may get their gradients later."""
    takers = later(weight_NK), later(bias)
    if takers[0] is None or x_TK.dim() != 2 or (bias is not None and takers[1] is None):
        return F.linear(x_TK, weight_NK, bias)
    return _Linear.apply(x_TK, weight_NK, bias, *takers)  # type: ignore[no-untyped-call]


def multiplied(x_TK: Tensor, weight_KN: Tensor) -> Tensor:
    """X weight, whose weight may get its gradient later."""
    taker = later(weight_KN)
    if taker is None or x_TK.dim() != 2:
        return x_TK @ weight_KN
    return _Product.apply(x_TK, weight_KN, taker)  # type: ignore[no-untyped-call]


def _narrow(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """As autocast makes them for a product; it leaves double precision alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *weights)]


def _casts_once() -> bool:
    """Whether autocast casts a weight once for all its uses; of two regions of autocast it would be each."""
    return torch.is_autocast_cache_enabled()


def _of_left(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Gradient of the left factor of a product, by the very product autograd would take."""
    return right.mm(grad.t()).t() if _by_columns(left) else grad.mm(right.t())


def _of_right(grad: Tensor, left: Tensor, by_columns: bool) -> Tensor:
    """The same of the right factor, which lies in memory by columns or by rows."""
    return grad.t().mm(left).t() if by_columns else left.t().mm(grad)


def _by_columns(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


class _Linear(torch.autograd.Function):
    """x W^T + b; keeps x, and in the backward its gradient, for those of W and b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_taker: Later,
        bias_taker: Later | None,
    ) -> Tensor:
        narrow_x, narrow, narrow_bias = _narrow(x, weight, bias)
        assert narrow_x is not None
        assert narrow is not None
        ctx.save_for_backward(narrow_x, narrow)
        ctx.takers, ctx.dtype, ctx.cast_once = (weight_taker, bias_taker), x.dtype, _casts_once()
        ctx.bias_shape = None if bias is None else bias.shape
        return F.linear(narrow_x, narrow, narrow_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight_taker, bias_taker = ctx.takers
        dx = _of_left(grad, x, weight.t()).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        by_columns = _by_columns(weight.t())
        weight_taker.add(lambda: _of_right(grad, x, by_columns).t(), x, grad, cast_once=ctx.cast_once)
        if bias_taker is not None:
            # Beside its weight, or at once like it: alone it would keep as much for a sum over tokens.
            bias_taker.add(lambda: grad.sum_to_size(ctx.bias_shape), x, grad, cast_once=ctx.cast_once)
        return dx, None, None, None, None


class _Product(torch.autograd.Function):
    """X W; keeps x, and in the backward its gradient, for that of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, taker: Later) -> Tensor:
        narrow_x, narrow = _narrow(x, weight)
        assert narrow_x is not None
        assert narrow is not None
        ctx.save_for_backward(narrow_x, narrow)
        ctx.taker, ctx.dtype, ctx.cast_once = taker, x.dtype, _casts_once()
        return narrow_x @ narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = _of_left(grad, x, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        by_columns = _by_columns(weight)
        ctx.taker.add(lambda: _of_right(grad, x, by_columns), x, grad, cast_once=ctx.cast_once)
        return dx, None, None
