"""Single values of a request: numbers, switches and lists that are what they should be, or are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from freescale.errors import DataError


def whole_number(name: str, given: Any, *, next_step: str) -> int:
    """A whole number from 1; one of numpy, too."""
    try:
        number = None if isinstance(given, bool | np.bool_) else operator.index(given)
    except TypeError:
        number = None
    if number is None:
        raise DataError(
            f"{name} must be a whole number", got=_with_type(given), allowed="1 or more", next_step=next_step
        )
    if number < 1:
        raise DataError(f"{name} must be at least 1", got=number, next_step=next_step)
    return number


def yes_or_no(name: str, given: Any) -> bool:
    """A switch; what Python would only take for one is refused, "no" among it."""
    if not isinstance(given, bool | np.bool_):
        raise DataError(
            f"{name} is on or off", got=_with_type(given), allowed="True or False; None: as evaluated"
        )
    return bool(given)


def check_list(name: str, given: Any, of: str = "items") -> None:
    """Refuse what has no order and no number of values: one value alone, a text, values by name."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__"):
        raise DataError(f"{name} must be a list of {of}", got=_with_type(given))


def plain_list(name: str, given: Any) -> Any:
    """The same list; tensors as numbers: one of torch has a length even where it is a single id."""
    if isinstance(given, Tensor):
        given = given.tolist()
    check_list(name, given)
    if len(given) and isinstance(given[0], Tensor):
        return [each.tolist() if isinstance(each, Tensor) else each for each in given]
    return given


def _with_type(given: Any) -> str:
    return f"{given!r} ({type(given).__name__})"
