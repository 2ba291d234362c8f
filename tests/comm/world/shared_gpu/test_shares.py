"""Virtual GPUs: shares that fit side by side, an environment that ranks can live in, and honest messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.world import launcher as launch_module
from freescale.comm.world import ranks
from freescale.comm.world.launcher import launch
from freescale.comm.world.shared_gpu import shares as module
from freescale.comm.world.shared_gpu.mps import PREFIX
from freescale.comm.world.shared_gpu.shares import (
    Gpu,
    check_request,
    first_visible,
    sm_percentage,
    virtual_gpus,
)
from freescale.errors import TrainingError
from tests.comm import fake_mps

pytestmark = pytest.mark.timed

REPOSITORY = Path(__file__).parents[4]
H200 = Gpu("NVIDIA H200", num_sms=132, memory_gib=140.0)

# Stands in for the interpreter: instead of `-m freescale PROGRAM` it runs PROGRAM itself.
STAND_IN = (
    f"#!{sys.executable}\nimport os, signal, sys, time\nrank = int(os.environ['RANK'])\nexec(sys.argv[-1])\n"
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="MPS exists on Linux only")


@pytest.mark.parametrize(
    ("num_sms", "num_ranks", "share"),
    [(132, 1, (100, 132)), (132, 2, (50, 66)), (132, 3, (34, 44)), (132, 4, (25, 32)), (132, 8, (13, 16))],
)
def test_shares_of_an_h200(num_sms, num_ranks, share):
    assert sm_percentage(num_sms, num_ranks) == share


@given(num_ranks=st.integers(1, 48), more=st.integers(0, 200))
def test_shares_fit_side_by_side_and_waste_less_than_two_sms_a_rank_and_percent(num_ranks, more):
    num_sms = 2 * num_ranks + more
    percent, sms = sm_percentage(num_sms, num_ranks)
    assert 1 <= percent <= 100
    assert num_ranks * sms <= num_sms
    assert sms >= num_sms / num_ranks - num_sms / 100 - 2


@pytest.mark.parametrize(
    ("visible", "first"), [(None, "0"), ("", "0"), ("2", "2"), ("3,1", "3"), ("GPU-ab,GPU-cd", "GPU-ab")]
)
def test_the_first_visible_gpu_is_shared(visible, first):
    assert first_visible(visible) == first


@needs_linux
@pytest.mark.parametrize(("visible", "seen"), [("3,1", "0"), ("GPU-ab,GPU-cd", "GPU-ab")])
def test_ranks_are_clients_of_the_daemon_and_number_the_gpu_as_it_does(tmp_path, monkeypatch, visible, seen):
    story = fake_mps.install(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with virtual_gpus(4, gpu=H200) as shared:
        assert shared.partitioned
        assert shared.environment["CUDA_VISIBLE_DEVICES"] == seen
        assert shared.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert PREFIX in shared.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert shared.environment["FREESCALE_VIRTUAL_GPUS"] == "4"
        assert "32 of 132 SMs (25 %) and 33 GiB each" in shared.message
    assert story.read_text().startswith(f"start {visible.split(',')[0]} ")


@needs_linux
def test_without_mps_ranks_take_turns_and_the_message_says_what_that_means(tmp_path, monkeypatch):
    fake_mps.install(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with virtual_gpus(2, gpu=H200) as shared:
        assert not shared.partitioned
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in shared.environment
        assert shared.environment["CUDA_VISIBLE_DEVICES"] == "3"
        assert "not installed" in shared.message
        assert "time-sliced" in shared.message


@pytest.mark.parametrize("num_ranks", [0, 49, 67])
def test_a_gpu_has_an_end(num_ranks):
    with pytest.raises(TrainingError, match="that many ranks"), virtual_gpus(num_ranks, gpu=H200):
        raise AssertionError


def test_no_gpu_is_an_error_with_a_next_step(monkeypatch):
    def no_driver(name: str) -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(module.ctypes, "CDLL", no_driver)
    with pytest.raises(TrainingError, match=r"--nproc N run\.device=cpu"), virtual_gpus(2):
        raise AssertionError


def test_the_driver_is_asked_without_making_a_context(monkeypatch):
    calls = []

    class Driver:
        """Answers like an H200."""

        def __getattr__(self, name: str):
            def call(*arguments):
                calls.append(name)
                if name == "cuDeviceGetAttribute":
                    arguments[0]._obj.value = 132 if arguments[1] == 16 else 0
                if name == "cuDeviceTotalMem_v2":
                    arguments[0]._obj.value = 140 << 30
                if name == "cuDeviceGetName":
                    arguments[0].value = b"NVIDIA H200"
                return 0

            return call

    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Driver())
    assert module.find_gpu() == H200
    assert not any("Ctx" in name or "Retain" in name for name in calls)


@needs_linux
@pytest.mark.parametrize(
    ("mode", "finding"),
    [("", "4 x 32 SMs, 8 x 16 SMs"), ("refuses", "already running"), (None, "not installed")],
)
def test_the_doctor_tries_it(tmp_path, monkeypatch, mode, finding):
    fake_mps.install(tmp_path, monkeypatch, mode or "")
    if mode is None:
        monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "find_gpu", lambda: H200)
    assert finding in module.can_share()
    assert ("time-sliced" in module.can_share()) == (mode != "")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"nproc": 3, "device": "auto"}, "different numbers"),
        ({"nproc": 1, "device": "cpu"}, "run.device=cpu"),
    ],
)
def test_contradictions_are_refused(wish, why):
    check_request(2, nproc=2, device="cuda")
    check_request(2, nproc=1, device="auto")
    with pytest.raises(TrainingError, match=why):
        check_request(2, **wish)


def test_a_rank_cannot_start_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TrainingError, match="is a rank already"):
        check_request(2, nproc=1, device="auto")


def test_one_shared_gpu_is_no_run_on_several_machines():
    with pytest.raises(TrainingError, match="--nnodes asks for several machines"):
        check_request(2, nproc=1, nnodes=2, device="auto")


def test_all_ranks_compute_on_the_first_gpu(monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 2)
    assert ranks.pick_device("auto", local_rank=3) == torch.device("cuda", 1)
    monkeypatch.setenv("FREESCALE_VIRTUAL_GPUS", "4")
    assert ranks.pick_device("auto", local_rank=3) == torch.device("cuda", 0)
    assert ranks.pick_device("cpu", local_rank=3) == torch.device("cpu")


def test_a_rank_that_cannot_reach_the_gpu_does_not_train_on_the_cpu_instead(monkeypatch):
    monkeypatch.setenv("FREESCALE_VIRTUAL_GPUS", "4")
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="cannot use the GPU it was to share"):
        ranks.pick_device("auto")


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Path:
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    monkeypatch.setattr(launch_module.sys, "executable", str(script))
    monkeypatch.setattr(launch_module, "_GRACE_S", 1.0)
    return script


@needs_linux
def test_a_failed_rank_ends_the_daemon_too(tmp_path, monkeypatch, stand_in):
    story = fake_mps.install(tmp_path, monkeypatch)
    program = "sys.exit(3) if rank == 1 and os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'] == '50' else 0"
    with (
        pytest.raises(TrainingError, match="rank 1 ended with exit code 3"),
        virtual_gpus(2, gpu=H200) as shared,
    ):
        launch([program], num_ranks=2, environment=shared.environment)
    assert story.read_text().endswith("quit\n")
    assert list((tmp_path / "temporary").iterdir()) == []


LAUNCH = f"""
import signal, sys; sys.path.insert(0, {str(REPOSITORY)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
from freescale.comm.world.launcher import launch
from freescale.comm.world.shared_gpu.shares import Gpu, virtual_gpus
with virtual_gpus(2, gpu=Gpu("GPU", 132, 140.0)) as shared:
    sys.executable = sys.argv[1]
    program = "open(os.environ['SEEN'] + str(rank), 'w').close(); time.sleep(120)"
    launch([program], num_ranks=2, environment=shared.environment)
"""


@needs_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_ranks_and_daemon_and_leaves_nothing(tmp_path, monkeypatch, stand_in, number):
    story = fake_mps.install(tmp_path, monkeypatch)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen-"))
    python = os.path.realpath("/proc/self/exe")
    launcher = subprocess.Popen([python, "-c", LAUNCH, str(stand_in)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("seen-*"))) < 2 and time.monotonic() < deadline:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(number)
    assert launcher.wait(60) != 0
    assert story.read_text().endswith("quit\n")
    assert list((tmp_path / "temporary").iterdir()) == []
