"""The MPS daemon: private, alone, and gone afterwards, whatever happens in between."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freescale.comm.world.shared_gpu import mps
from freescale.comm.world.shared_gpu.mps import MpsError, clear_leftovers, mps_daemon
from tests.comm import fake_mps

pytestmark = pytest.mark.timed

REPOSITORY = Path(__file__).parents[4]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS exists on Linux only")


def folders(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "temporary").glob(f"{mps.PREFIX}*"))


def daemons(folder: Path) -> list[int]:
    return mps._processes_of(folder)


def test_a_daemon_has_private_folders_and_is_gone_afterwards(tmp_path, monkeypatch):
    story = fake_mps.install(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")  # the user's; it would bound the daemon
    with mps_daemon(visible="3") as clients:
        (folder,) = folders(tmp_path)
        assert clients == {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        for each in (folder, folder / "pipe", folder / "log"):
            assert stat.S_IMODE(each.stat().st_mode) == 0o700
        assert len(daemons(folder)) == 1
    lines = story.read_text().splitlines()
    assert lines[0] == f"start 3 None 0o40700 {folder / 'pipe'}"
    assert lines[1:] == ["get_default_active_thread_percentage", "quit"]
    assert daemons(folder) == []
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_it_ends_with_whatever_ends_the_block(tmp_path, monkeypatch, error):
    fake_mps.install(tmp_path, monkeypatch)
    seen = []

    def fail() -> None:
        seen.extend(folders(tmp_path))
        raise error

    with pytest.raises(error), mps_daemon(visible="0"):
        fail()
    assert daemons(seen[0]) == []
    assert folders(tmp_path) == []


def test_one_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    fake_mps.install(tmp_path, monkeypatch, "stubborn")
    with mps_daemon(visible="0"):
        (folder,) = folders(tmp_path)
        monkeypatch.setattr(mps, "_PATIENCE_S", 1.0)  # not for its start
    deadline = time.monotonic() + 30
    while daemons(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert daemons(folder) == []
    assert folders(tmp_path) == []


@pytest.mark.parametrize(
    ("mode", "why"),
    [("refuses", "already running"), ("mute", "does not answer"), (None, "not installed")],
)
def test_where_it_cannot_run_the_reason_is_told_and_nothing_is_left(tmp_path, monkeypatch, mode, why):
    fake_mps.install(tmp_path, monkeypatch, mode or "")
    if mode is None:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MpsError, match=why), mps_daemon(visible="0"):
        raise AssertionError("there is no daemon")
    assert folders(tmp_path) == []


def test_two_at_a_time_do_not_clear_each_other_away(tmp_path, monkeypatch):
    fake_mps.install(tmp_path, monkeypatch)
    monkeypatch.setattr(mps, "_YOUNG_S", -1.0)
    with mps_daemon(visible="0"):
        (first,) = folders(tmp_path)
        with mps_daemon(visible="0"):
            assert len(folders(tmp_path)) == 2
            assert daemons(first)
        assert folders(tmp_path) == [first]
        assert daemons(first)


HOLD = f"""
import signal, sys, time; sys.path.insert(0, {str(REPOSITORY)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
from freescale.comm.world.shared_gpu.mps import ended_by_signals, mps_daemon
with ended_by_signals(), mps_daemon(visible="0"):
    print("up", flush=True)
    time.sleep(120)
"""


def hold() -> subprocess.Popen[str]:
    """Another process with a daemon."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "up\n"
    return holder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_clears_up(tmp_path, monkeypatch, number):
    fake_mps.install(tmp_path, monkeypatch)
    with hold() as holder:
        (folder,) = folders(tmp_path)
        holder.send_signal(number)
        assert holder.wait(30) != 0
    assert daemons(folder) == []
    assert folders(tmp_path) == []


def test_what_a_killed_launcher_left_is_cleared_by_the_next(tmp_path, monkeypatch):
    story = fake_mps.install(tmp_path, monkeypatch)
    with hold() as holder:
        (folder,) = folders(tmp_path)
        holder.kill()
        holder.wait(30)
    assert daemons(folder), "SIGKILL leaves the daemon; otherwise this test shows nothing"
    program = str(tmp_path / "bin" / "nvidia-cuda-mps-control")
    assert clear_leftovers(program) == [], "it may be one that is just starting"
    os.utime(folder, (0, 0))
    stranger = tmp_path / "temporary" / "something-else"
    stranger.mkdir()
    os.utime(stranger, (0, 0))
    with mps_daemon(visible="0"):
        assert daemons(folder) == []
        assert folder not in folders(tmp_path)
    assert story.read_text().count("quit") == 2
    assert stranger.exists()
