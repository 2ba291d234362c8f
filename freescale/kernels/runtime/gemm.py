"""Products of tokens and weights by torch's library, with its kernels loaded before they are needed.

For every few hundred tokens more the library picks another kernel. Before one runs for the first time it is loaded, and
for that the host stands until the GPU has done all it was given: tens of milliseconds, after which the GPU waits for
the host. Batches differ in tokens, so this would go on for hundreds of steps, on one rank or another, and all others
wait for that one. So the first product of a kind is preceded by those of all sizes that a run expects, or of all sizes
around it, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from freescale.kernels.runtime.memory import free_bytes

_SIZES = 256
_FEW_TOKENS, _MANY_TOKENS = 4096, 2**18
"""Below the first a GPU has little to do when it is waited for; above the second one kernel is good for all sizes."""

_Kind = tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...], bool]
_loaded: dict[_Kind, tuple[int, int]] = {}
_expected: tuple[int, int] | None = None


@contextmanager
def gemm_warmup(fewest: int, most: int) -> Iterator[None]:
    """Inside, batches will have so many tokens. Others may come: their kernels are loaded when they are met."""
    global _expected
    before, _expected = _expected, (fewest, most)
    try:
        yield
    finally:
        _expected = before


def product(x_TK: Tensor, weight_KN: Tensor) -> Tensor:
    """The product as both are: told where to write, autocast leaves it alone. Switching that off would take 8 us."""
    if x_TK.is_cuda:
        _load_kernels(x_TK, weight_KN, adds=False)
    return torch.mm(x_TK, weight_KN, out=x_TK.new_empty(x_TK.shape[0], weight_KN.shape[1]))


def add_product_to(sum_TN: Tensor, x_TK: Tensor, weight_KN: Tensor) -> None:
    """Add x weight in place, so autocast leaves it alone, too."""
    if x_TK.is_cuda:
        _load_kernels(x_TK, weight_KN, adds=True)
    sum_TN.addmm_(x_TK, weight_KN)


def weight_gradient(x_TK: Tensor, grad_TN: Tensor) -> Tensor:
    """x^T grad, summed over the tokens."""
    return torch.mm(x_TK.t(), grad_TN, out=x_TK.new_empty(x_TK.shape[1], grad_TN.shape[1]))


def sizes_to_load(
    num_tokens: int, loaded: tuple[int, int] | None, expected: tuple[int, int] | None = None
) -> range:
    """Numbers of tokens to multiply once before a product of so many; none where none matters.

    Args:
        num_tokens: of the product.
        loaded: fewest and most that were loaded before.
        expected: fewest and most of the run, which are loaded at once; others never are. Without, those around
            `num_tokens`.
    """
    if not _FEW_TOKENS <= num_tokens <= _MANY_TOKENS or (loaded and loaded[0] <= num_tokens <= loaded[1]):
        return range(0)
    first, last = expected or (num_tokens // 2, 2 * num_tokens)
    if not first <= num_tokens <= last:
        return range(0)
    first, last = max(first, _FEW_TOKENS) if expected else first, min(last, _MANY_TOKENS)
    step = max(1, (last - first) // _SIZES)
    if loaded and num_tokens > loaded[1]:
        first = max(first, loaded[1]) if expected else loaded[1]
    elif loaded:
        last = min(last, loaded[0]) if expected else loaded[0]
    step = max(step, -((first - last) // (2 * _SIZES)))
    return range(first, min(last + step - 1, _MANY_TOKENS) + 1, step)


def _load_kernels(x: Tensor, weight: Tensor, *, adds: bool) -> None:
    kind = (x.device, x.dtype, weight.shape, weight.stride(), adds)
    before = _loaded.get(kind)
    sizes = sizes_to_load(x.shape[0], before, _expected)
    if not sizes or torch.cuda.is_current_stream_capturing():
        return
    known = [*(before or ()), sizes[0], sizes[-1], x.shape[0]]
    _loaded[kind] = min(known), max(known)
    if sizes[-1] * sum(weight.shape) * x.itemsize > free_bytes(x.device) // 4:
        return  # then they are loaded when they are met
    try:
        x_room, out_room = (x.new_empty(sizes[-1], width) for width in weight.shape)
        for size in sizes:
            if adds:
                out_room[:size].addmm_(x_room[:size], weight)
            else:
                torch.mm(x_room[:size], weight, out=out_room[:size])
    except torch.OutOfMemoryError:
        return
