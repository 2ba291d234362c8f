"""The NCCL that is loaded: its version, what it allows, and what ranks that share a GPU are told."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freescale.comm.world import joining
from freescale.comm.world.joining import backend_for
from freescale.comm.world.shared_gpu import nccl
from freescale.errors import TrainingError


@pytest.mark.parametrize(
    ("number", "version"), [(23102, (2, 31, 2)), (22809, (2, 28, 9)), (2804, (2, 8, 4)), (21005, (2, 10, 5))]
)
def test_numbers_of_versions(number, version):
    assert nccl.decode_version(number) == version


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "torch has no NCCL here"),
        ((2, 28, 9), "NCCL 2.28.9 takes one rank a GPU, 2.30.0 and later take several"),
        ((2, 30, 0), None),
        ((2, 31, 2), None),
    ],
)
def test_what_a_version_allows(version, problem, monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda: version)
    assert nccl.no_shared_nccl() == problem


def test_it_can_be_kept_out(monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda: (2, 31, 2))
    monkeypatch.setenv("FREESCALE_SHARED_NCCL", "0")
    assert "FREESCALE_SHARED_NCCL" in nccl.no_shared_nccl()


@pytest.mark.parametrize(("num_sms", "ctas"), [(132, 8), (66, 8), (32, 5), (16, 2), (2, 1)])
def test_three_communicators_that_wait_leave_half_of_the_sms(num_sms, ctas):
    variables = nccl.sharing_variables(num_sms)
    assert variables == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(ctas)}
    assert 3 * ctas <= max(3, num_sms // 2)


@pytest.mark.parametrize(
    ("device", "shared", "mps", "version", "backend"),
    [
        ("cpu", 0, False, (2, 31, 2), "gloo"),
        ("cuda", 0, False, (2, 28, 9), "cpu:gloo,cuda:nccl"),
        ("cuda", 2, True, (2, 28, 9), "gloo"),
        ("cuda", 2, False, (2, 31, 2), "gloo"),
        ("cuda", 2, True, (2, 31, 2), "cpu:gloo,cuda:nccl"),
        ("cuda", 4, True, (2, 31, 2), "gloo"),
    ],
)
def test_who_is_given_nccl(device, shared, mps, version, backend, monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda: version)
    monkeypatch.setenv("FREESCALE_VIRTUAL_GPUS", str(shared))
    if mps:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    else:
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert backend_for(torch.device(device)) == backend


def test_another_wish_is_refused(monkeypatch):
    monkeypatch.setattr(nccl, "loaded_nccl", lambda: (2, 31, 2))
    monkeypatch.setenv("FREESCALE_SHARED_NCCL", "yes")
    with pytest.raises(TrainingError, match="neither 0 nor 1"):
        nccl.no_shared_nccl()


def test_more_than_two_ranks_of_a_gpu_have_nccl_when_asked(monkeypatch):
    """Their own work stood still while kernels of others waited for it: with 8 always, with 4 now and then."""
    monkeypatch.setattr(nccl, "loaded_nccl", lambda: (2, 31, 2))
    monkeypatch.setenv("FREESCALE_VIRTUAL_GPUS", "8")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    told = joining._kept_from_nccl(torch.device("cuda"))
    assert told is not None
    assert "8 ranks of one GPU may hang" in told
    assert "FREESCALE_SHARED_NCCL=1" in told
    monkeypatch.setenv("FREESCALE_SHARED_NCCL", "1")
    assert backend_for(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    assert joining._kept_from_nccl(torch.device("cuda")) is None
    monkeypatch.setenv("FREESCALE_SHARED_NCCL", "0")  # the user's own wish needs no word
    assert backend_for(torch.device("cuda")) == "gloo"
    assert joining._kept_from_nccl(torch.device("cuda")) is None


def test_a_preloaded_library_is_the_one_that_answers(tmp_path: Path):
    """As wheels have it: torch's own library is found by a path inside the wheel, a preloaded one answers first."""
    compiler = next((name for name in ("gcc", "cc") if _is_there(name)), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "fake.c"
    source.write_text("int ncclGetVersion(int* number) { *number = 23102; return 0; }\n")
    library = tmp_path / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    # In a process of its own: a library that is mapped once would be taken for torch's by every test after this one.
    code = "from freescale.comm.world.shared_gpu import nccl; print(nccl._version_of(None))"
    for environment, answer in (({"LD_PRELOAD": str(library)}, "(2, 31, 2)"), ({}, "None")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(Path(nccl.__file__).parents[4]), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == answer


def test_a_library_without_the_function_is_no_nccl():
    assert nccl._version_of(ctypes.util.find_library("c")) is None


def _is_there(program: str) -> bool:
    import shutil

    return shutil.which(program) is not None
