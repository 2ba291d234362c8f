"""Copies of a GPU that all ranks share: one kernel for all of them, by the widest word that fits."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.rings import copies_inside, cuda_driver
from freescale.comm.rings.copies_inside import MOST_COPIES, DriverInside, word_of
from freescale.comm.transports.kinds import copy_engine
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.errors import TrainingError


class Library:
    """Says yes to everything, and keeps what kernels are started with."""

    def __init__(self, *, refuses: str = "") -> None:
        self.refuses, self.kernels, self.launched = refuses, dict[int, bytes](), list[Any]()

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 7 + len(self.kernels)
        self.kernels[function._obj.value] = name
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:  # noqa: N802
        blocks, copies, _, threads, _, _, shared, stream, arguments, extra = rest
        assert (shared, extra) == (0, None)
        table = struct.unpack(f"={3 * copies}Q", ctypes.string_at(arguments[0], 24 * copies))
        found = [table[first : first + 3] for first in range(0, len(table), 3)]
        self.launched.append((self.kernels[function.value], blocks * threads, found, stream.value))
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: int(name == self.refuses)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: made)
    return made


def test_each_kernel_is_started_once_before_anything_waits(library: Library) -> None:
    DriverInside(0)
    assert [each[0] for each in library.launched] == [b"copy_pieces_16", b"copy_pieces_4", b"copy_pieces_1"]
    assert all(copies == [(0, 0, 0)] for _, _, copies, _ in library.launched)


def test_copies_are_one_kernel(library: Library) -> None:
    driver = DriverInside(0)
    library.launched.clear()
    copies = [(4096 * number, 16, 8192 * number) for number in range(1, 8)]
    driver.copy(copies, 9)
    [(name, threads, told, stream)] = library.launched
    assert (name, told, stream) == (b"copy_pieces_16", copies, 9)
    # No more threads than copy four words each.
    assert 4 * 16 * threads >= 7 * 8192 > 4 * 16 * (threads - 512)


def test_more_than_its_arguments_hold_are_several(library: Library) -> None:
    driver = DriverInside(0)
    library.launched.clear()
    copies = [(16 * number, 32, 16) for number in range(2 * MOST_COPIES + 1)]
    driver.copy(copies, 9)
    assert [len(each[2]) for each in library.launched] == [MOST_COPIES, MOST_COPIES, 1]
    assert [copy for each in library.launched for copy in each[2]] == copies
    driver.copy([], 9)
    assert len(library.launched) == 3


@given(
    st.lists(st.tuples(*[st.integers(0, 1 << 40)] * 3), min_size=1, max_size=9),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_words_divide_all_addresses_and_sizes(copies: list[tuple[int, int, int]], by: int) -> None:
    copies = [(by * target, by * source, by * size) for target, source, size in copies]
    word = word_of(copies)
    assert all(number % word == 0 for copy in copies for number in copy)
    wider = [each for each in copies_inside.WORDS if each > word]
    assert all(any(number % each for copy in copies for number in copy) for each in wider)


def facts(*gpus: str) -> GroupFacts:
    import torch

    ranks = [RankFacts("here", 1, "all", gpu, frozenset(gpus)) for gpu in gpus]
    return GroupFacts(ranks, 0, torch.device("cuda", 0), "gloo")


def test_what_stays_inside_a_gpu_is_copied_by_it_and_nothing_else(library: Library) -> None:
    driver, taking, how = copy_engine._drivers_of(facts("a", "a"), 0)
    assert driver is taking
    assert isinstance(driver, DriverInside)
    assert "one for all of a round" in how
    for gpus in (("a", "b"), ("a", "a", "b", "b")):
        driver, taking, _ = copy_engine._drivers_of(facts(*gpus), 0)
        assert type(driver) is cuda_driver.CudaDriver
        assert isinstance(taking, DriverInside)


def test_a_driver_that_loads_no_kernel_copies_itself_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: Library(refuses="cuModuleLoadData"))
    with pytest.raises(TrainingError):
        DriverInside(0)
    driver, taking, how = copy_engine._drivers_of(facts("a", "a"), 0)
    assert driver is taking
    assert type(driver) is cuda_driver.CudaDriver
    assert "one for each of them" in how
    assert "cuModuleLoadData" in how


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_100"])
def test_the_kernels_can_be_assembled(architecture: str, tmp_path: Path) -> None:
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("no ptxas here")
    written = tmp_path / "kernels.ptx"
    written.write_text(copies_inside.PTX)
    command = [assembler, f"-arch={architecture}", str(written), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
