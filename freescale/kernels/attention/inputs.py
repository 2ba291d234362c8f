"""What attention may be given, looked at before a kernel would read or leave out what it should not.

Values are looked at once a batch, when its layout is made; a layer compares a few sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freescale.errors import FreeScaleError


class AttentionInputError(FreeScaleError, ValueError):
    """Tensors or options that do not fit each other; a ValueError, too."""


def check_offsets(offsets: Tensor) -> npt.NDArray[np.int64]:
    """Where the sequences start, and the end, as numbers that rise from 0."""
    if not isinstance(offsets, Tensor):
        _refuse_offsets(f"a {type(offsets).__name__}", "wrap them: torch.tensor(offsets)")
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.ndim != 1 or not len(offsets):
        _refuse_offsets(
            f"{offsets.dtype} of shape {tuple(offsets.shape)}", "lengths.cumsum(0) with a 0 in front"
        )
    if offsets.device.type != "cpu":
        _refuse_offsets(f"a tensor on {offsets.device}", "keep offsets on the CPU: offsets.cpu()")
    starts = offsets.numpy().astype(np.int64, copy=False)
    if starts[0] != 0:
        _refuse_offsets(f"offsets[0] = {starts[0]}", "put a 0 in front")
    falls = starts[1:] < starts[:-1]
    if falls.any():
        n = int(falls.argmax()) + 1
        _refuse_offsets(
            f"offsets[{n}] = {starts[n]} after {starts[n - 1]}", "lengths.cumsum(0) with a 0 in front"
        )
    return starts


def _refuse_offsets(got: str, next_step: str) -> None:
    raise AttentionInputError(
        "offsets must say where each sequence starts, and where the last one ends",
        got=got,
        allowed="a tensor of whole numbers on the CPU, [sequences + 1], rising from 0 to the number of tokens",
        next_step=next_step,
    )


def check_shapes(q: Tensor, k: Tensor, v: Tensor, num_tokens: int, *, share_heads: bool = False) -> None:
    """Refuse tensors that do not fit each other or the offsets; `share_heads`: k and v may have fewer than q."""
    shapes = q.shape, k.shape, v.shape
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 3:
        raise _misfit("q, k and v must be [tokens, heads, width]", shapes)
    (tokens, heads, width), (k_tokens, k_heads, k_width), (v_tokens, v_heads, _) = shapes
    if not tokens == k_tokens == v_tokens or width != k_width:
        raise _misfit("q, k and v must have the same tokens, q and k the same width", shapes)
    if share_heads and (k_heads != v_heads or not k_heads or heads % k_heads):
        raise _misfit("heads of q must be a multiple of those of k and v", shapes)
    if not share_heads and not heads == k_heads == v_heads:
        raise _misfit("q, k and v must have the same number of heads", shapes)
    check_tokens(tokens, num_tokens)


def check_tokens(tokens: int, num_tokens: int) -> None:
    """Refuse offsets of another number of tokens."""
    if tokens != num_tokens:
        raise AttentionInputError(
            "offsets do not end at the number of tokens",
            got=f"offsets that end at {num_tokens}, {tokens} tokens",
            next_step="pass offsets (and the layout made of them) of the batch that q, k and v belong to",
        )


def _misfit(what: str, shapes: tuple[torch.Size, ...]) -> AttentionInputError:
    got = ", ".join(f"{name} {list(shape)}" for name, shape in zip("qkv", shapes))
    return AttentionInputError(
        what, got=got, allowed="[tokens, heads, width] each; the width of v may differ"
    )
