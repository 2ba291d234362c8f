"""Flags in memory that several processes share: loads and stores that keep the order of the copies around them.

A plain store may become visible before the copy it announces: on Arm processors it does. So a flag is stored with
release order (everything written before it is visible with it) and loaded with acquire order (nothing read after it is
older than it). Python and numpy have no such operations; compiled here, they cost half a microsecond.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, njit, types, uint32, void
from numba.extending import intrinsic
from numpy.typing import NDArray

Flags = NDArray[np.uint32]
_WORDS = uint32[::1]


def _place(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Where a word of an array lies."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def _store(typing: Any, flags: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], place, "release", 4)
        return context.get_dummy_value()

    return types.void(flags, types.int64, types.uint32), generate


@intrinsic
def _load(typing: Any, flags: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(place, "acquire", 4)

    return types.uint32(flags, types.int64), generate


@intrinsic
def _add(typing: Any, flags: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", place, context.get_constant(types.uint32, 1), "seq_cst")

    return types.uint32(flags, types.int64), generate


@njit(void(_WORDS, int64, uint32), cache=True)
def store_flag(flags: Flags, place: int, value: int) -> None:
    """Write a flag; whoever sees it sees all that this process wrote before."""
    _store(flags, place, value)  # type: ignore[call-arg]


@njit(uint32(_WORDS, int64), cache=True)
def load_flag(flags: Flags, place: int) -> int:
    """Read a flag; all that was written before it was set can be read after this."""
    return _load(flags, place)  # type: ignore[call-arg]


@njit(uint32(_WORDS, int64), cache=True)
def add_one_to_flag(flags: Flags, place: int) -> int:
    """Count a flag up, whatever others do to it at the same moment; its value before."""
    return _add(flags, place)  # type: ignore[call-arg]
