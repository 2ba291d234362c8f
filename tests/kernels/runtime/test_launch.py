"""How kernels are started: compiled once for what they are compiled for, with nothing of a call left behind."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from freescale.kernels.runtime import launch as kernel_start
from freescale.kernels.runtime.launch import CachedLauncher, start_kernel

triton = pytest.importorskip("triton")


@triton.jit
def specialised_kernel(X, count):  # type: ignore[no-untyped-def]
    pass


@triton.jit(do_not_specialize=["count"])
def free_kernel(X, count):  # type: ignore[no-untyped-def]
    pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on CPU tensors are for the interpreter")
def test_whole_numbers_that_triton_would_build_in_are_refused() -> None:
    tensors = {"X": torch.zeros(4)}
    with pytest.raises(AssertionError, match="'count'"):
        start_kernel(specialised_kernel, (1,), tensors, {"count": 16}, {})
    start_kernel(specialised_kernel, (1,), tensors, {"count": 16.0}, {})
    start_kernel(free_kernel, (1,), tensors, {"count": 16}, {})


class _Compiled:
    """What Triton makes of a kernel: notes how it is started."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, notes):
        self.notes = notes

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        assert (stream, function, packed, metadata, enter, leave) == (50, 7, (4, 1, 0), None, None, None)
        self.notes.append(("straight", (x, y, z), arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.notes.append(("public", grid, arguments))


class _Kernel:
    """A kernel as Triton has it before it is compiled; its arguments stand in an order of its own."""

    do_not_specialize = ("rows",)
    arg_names = ("WIDTH", "Out", "scale", "X", "rows", "x_row")

    def __init__(self):
        self.params = [SimpleNamespace(name=name) for name in self.arg_names]
        self.notes, self.compiled = [], []

    def __getitem__(self, grid):
        def call(**given):
            assert given.pop("num_warps") == 4
            assert set(given) == set(self.arg_names)
            self.compiled.append(tuple(x.dtype for x in (given["X"], given["Out"])))
            return _Compiled(self.notes)

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver = SimpleNamespace(get_current_stream=lambda device: 50 + device)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return _Kernel()


CONSTANTS = {"x_row": 8, "WIDTH": 8, "num_warps": 4}


def _start(kernel, x, out, *, scale=0.5, rows=3):
    start_kernel(
        kernel, (rows, 2), {"X": x, "Out": out}, {"rows": rows, "scale": scale, "unused": 1.0}, CONSTANTS
    )


def test_a_kernel_is_compiled_once_and_then_started_with_new_addresses_and_numbers(kernel):
    x, out = torch.zeros(3, 8), torch.zeros(3, 8)
    _start(kernel, x, out)
    assert not kernel.notes
    _start(kernel, out, x, scale=0.25, rows=5)
    # The same by names in another order.
    start_kernel(
        kernel, (1,), {"Out": out, "X": x}, {"scale": 1.0, "rows": 16}, dict(reversed(CONSTANTS.items()))
    )
    start_kernel(
        kernel, (1,), {"Out": x, "X": out}, {"scale": 1.0, "rows": 16}, dict(reversed(CONSTANTS.items()))
    )
    first, last = ("straight", (5, 2, 1)), ("straight", (1, 1, 1))
    assert kernel.notes == [
        (*first, (8, x.data_ptr(), 0.25, out.data_ptr(), 5, 8)),
        (*last, (8, x.data_ptr(), 1.0, out.data_ptr(), 16, 8)),
    ]
    assert len(kernel.compiled) == 2


def test_other_types_devices_and_constants_are_compiled_anew(kernel, monkeypatch):
    x, half = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.float16)
    for out in (x, half, x, half):
        _start(kernel, x, out)
    assert kernel.compiled == [(torch.float32, torch.float32), (torch.float32, torch.float16)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    _start(kernel, x, x)
    assert len(kernel.compiled) == 3
    start_kernel(kernel, (1,), {"X": x, "Out": x}, {"rows": 3, "scale": 1.0}, {**CONSTANTS, "WIDTH": 16})
    assert len(kernel.compiled) == 4


def test_memory_that_is_not_aligned_is_left_to_triton(kernel):
    x, flat = torch.zeros(3, 8), torch.zeros(64)
    for n in range(3):
        _start(kernel, x, flat[1:25].view(3, 8))
        assert (len(kernel.compiled), len(kernel.notes)) == (n + 1, 0)
    _start(kernel, x, flat[4:28].view(3, 8))
    _start(kernel, x, flat[8:32].view(3, 8))
    assert (len(kernel.compiled), len(kernel.notes)) == (4, 1)


def test_no_tensor_is_kept_alive(kernel):
    x, out = torch.zeros(3, 8), torch.zeros(3, 8)
    for _ in range(2):
        _start(kernel, x, out)
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_whole_numbers_are_looked_at_when_a_kernel_is_compiled(kernel):
    x = torch.zeros(3, 8)
    with pytest.raises(AssertionError, match="'scale'"):
        _start(kernel, x, x, scale=1)


@pytest.mark.parametrize("reason", ["version", "hook"])
def test_the_public_way_is_taken_where_triton_is_not_known_or_watched(kernel, monkeypatch, reason):
    x = torch.zeros(3, 8)
    if reason == "version":
        monkeypatch.setattr(triton, "__version__", "3.60.0")
    _start(kernel, x, x)
    if reason == "hook":
        # A profiler may come and go.
        _start(kernel, x, x)
        assert kernel.notes.pop()[0] == "straight"
        monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [lambda metadata: None])
    _start(kernel, x, x)
    assert kernel.notes == [("public", (3, 2, 1), (8, x.data_ptr(), 0.5, x.data_ptr(), 3, 8))]


def test_descriptors_are_handed_on_as_they_are(kernel):
    x, out = torch.zeros(3, 8), torch.zeros(3, 8)
    described = SimpleNamespace(base=x, dtype=x.dtype)
    prepared = CachedLauncher(kernel, ("X", "Out"), ("rows", "scale"), CONSTANTS, described=1)
    for _ in range(2):
        prepared.start((1,), (described, out), (3, 0.5))
    assert kernel.notes == [("straight", (1, 1, 1), (8, out.data_ptr(), 0.5, described, 3, 8))]


def test_versions_are_told_apart_by_their_numbers():
    assert all(version.endswith(".") for version in kernel_start._KNOWN_VERSIONS)
