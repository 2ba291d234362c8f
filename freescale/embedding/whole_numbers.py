"""Ids and rows are whole numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.errors import DataError

_WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def check_whole(numbers: Tensor, *, what: str) -> None:
    """Refuse ids or rows that are no whole numbers: cut off, different ones would share a row."""
    if isinstance(numbers, Tensor) and (numbers.dtype in _WHOLE or not numbers.numel()):
        return
    raise DataError(
        f"{what} must be whole numbers in a tensor",
        got=numbers.dtype if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}",
        allowed="int64, or a smaller integer type",
        next_step=f"torch.tensor({what}, dtype=torch.int64)",
    )
