"""How a Triton kernel is started: the first time by Triton, which compiles it, from then on straight from the result.

Triton looks at every argument again to find what it has compiled: about 0.3 ms for the forty of an attention kernel on
the machine of the H200 results, longer than the kernel runs. Here a kernel's constants are fixed once; what is left
to look at is which kinds of tensors it is given, and on which GPU.

    start_kernel(kernel, grid, tensors, numbers, constants)      everything by its name
    CachedLauncher(kernel, ...).start(grid, tensors, numbers)    constants fixed, the rest in the order of their names

Kernels are compiled for the type of a tensor, whether its memory begins at a multiple of 16 bytes, and each constant.
Numbers must leave no trace in them: floats do not, whole numbers only where the kernel promises it
(`do_not_specialize`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from operator import attrgetter, itemgetter, or_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Triton's launchers that `_straight` is written for; any other is started the public way.
_KNOWN_VERSIONS = ("3.6.", "3.9.")

Grid = tuple[int, ...]
Run = Callable[[Grid, tuple[Any, ...]], None]
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]

_address = Tensor.data_ptr
_dtype = attrgetter("dtype")


@cache
def kernels_of(module: str) -> Any:
    """A module of kernels, imported when first asked for: where no kernel is started, Triton need not be there.

    An import statement in a function takes up to 3 us every time it is passed.
    """
    return importlib.import_module(f"freescale.kernels.{module}")


class CachedLauncher:
    """A kernel with its constants fixed.

    Args:
        kernel: a Triton function.
        tensors: names of the tensors that `start` will be given, in order.
        numbers: the same of the numbers. Those the kernel has no argument for are left out.
        constants: what it is compiled for, and options such as num_warps.
        described: how many of the tensors, the first ones, come as descriptors.
    """

    def __init__(
        self,
        kernel: Any,
        tensors: Iterable[str],
        numbers: Iterable[str],
        constants: Mapping[str, Any],
        *,
        described: int = 0,
    ) -> None:
        self._kernel, self._described = kernel, described
        self._tensors, self._numbers = tuple(tensors), tuple(numbers)
        self._constants = {name: _constant(x) for name, x in constants.items()}
        # The interpreter, which runs kernels in tests, compiles nothing.
        self._compiles = hasattr(kernel, "params")
        self._compiled: dict[tuple[Any, ...], Run] = {}

    def start(self, grid: Grid, tensors: tuple[Any, ...], numbers: tuple[float, ...] = ()) -> None:
        """Start as many programs as the grid has places."""
        if not self._compiles:
            self._by_triton(grid, tensors, numbers)
            return
        first: tuple[Any, ...] = ()
        rest = tensors
        if self._described:
            first, rest = tensors[: self._described], tensors[self._described :]
        addresses = tuple(map(_address, rest))
        if reduce(or_, addresses, 0) % 16:
            # Rare, and another kernel, which Triton finds.
            self._by_triton(grid, tensors, numbers)
            return
        device = torch.cuda.current_device()
        kinds = (device, *map(_dtype, rest), *[x.base.dtype for x in first])
        run = self._compiled.get(kinds)
        if run is None:
            made = self._by_triton(grid, tensors, numbers)
            self._compiled[kinds] = self._bound(made, device)
        else:
            run(grid, first + addresses + numbers)

    def _by_triton(self, grid: Grid, tensors: tuple[Any, ...], numbers: tuple[float, ...]) -> Any:
        """Started by Triton, which compiles first if need be; what it has compiled."""
        given = {name: x for name, x in zip(self._numbers, numbers) if name in self._kernel.arg_names}
        _check_numbers(self._kernel, given)
        return self._kernel[grid](**dict(zip(self._tensors, tensors)), **given, **self._constants)

    def _bound(self, made: Any, device: int) -> Run:
        """Starts the compiled kernel on tensors and numbers, in the order that `start` has them."""
        names = [param.name for param in self._kernel.params]
        assert len(names) > 1, f"{self._kernel}: a kernel has several arguments"
        # Only what stays the same is remembered: a tensor kept here would never be freed.
        fixed_names = [name for name in names if name in self._constants]
        fixed = tuple(self._constants[name] for name in fixed_names)
        order = [*self._tensors, *self._numbers, *fixed_names]
        pick = itemgetter(*map(order.index, names))
        return _straight(made, device, pick, fixed) or _public(made, pick, fixed)


_prepared: dict[tuple[Any, ...], CachedLauncher] = {}


def start_kernel(
    kernel: Any,
    grid: Grid,
    tensors: Mapping[str, Any],
    numbers: Mapping[str, float],
    constants: Mapping[str, Any],
    descriptors: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """kernel[grid](**tensors, **numbers, **constants, **descriptors), by what was prepared for these names.

    Args:
        kernel: a Triton function.
        grid: as many programs as it has places.
        tensors: what it is given as addresses.
        numbers: see above.
        constants: see above.
        descriptors: what it is given as descriptors of tensors.
    """
    # Its id, as Triton works a kernel's hash out anew each time; what is prepared keeps the kernel, so nobody else
    # gets the id.
    key = (id(kernel), *descriptors, None, *tensors, *numbers, *constants, *constants.values())
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = CachedLauncher(
            kernel, (*descriptors, *tensors), numbers, constants, described=len(descriptors)
        )
    prepared.start(grid, (*descriptors.values(), *tensors.values()), tuple(numbers.values()))


def _public(made: Any, pick: Pick, fixed: tuple[Any, ...]) -> Run:
    """As Triton documents it. Addresses are whole numbers, which every launcher takes as well as tensors."""

    def run(grid: Grid, changing: tuple[Any, ...]) -> None:
        made[(*grid, 1, 1)[:3]](*pick(changing + fixed))

    return run


def _straight(made: Any, device: int, pick: Pick, fixed: tuple[Any, ...]) -> Run | None:
    """The same without what Triton does around it, two calls of hooks above all; None where it is not known how."""
    import triton

    if not triton.__version__.startswith(_KNOWN_VERSIONS):
        return None
    runtime, stream_of = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream
    public, launcher = _public(made, pick, fixed), made.run
    function, packed = made.function, made.packed_metadata  # after `run`, which loads the kernel

    def run(grid: Grid, changing: tuple[Any, ...]) -> None:
        # Somebody, a profiler, may want to be told of every launch.
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            public(grid, changing)
            return
        x, y, z = (*grid, 1, 1)[:3]
        arguments = pick(changing + fixed)
        launcher(x, y, z, stream_of(device), function, packed, None, None, None, *arguments)

    return run


def _check_numbers(kernel: Any, numbers: Mapping[str, float]) -> None:
    """Triton builds whole numbers that are 1, or multiples of 16, into a kernel, which then would serve others, too."""
    promised = getattr(kernel, "do_not_specialize", None)
    if promised is None:  # as the interpreter keeps it
        promised = getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    wrong = [name for name, x in numbers.items() if isinstance(x, int) and name not in promised]
    assert not wrong, f"{kernel}: {wrong} must be in do_not_specialize"


def _constant(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        from triton import language as tl

        return getattr(tl, str(x).removeprefix("torch."))
    return x
