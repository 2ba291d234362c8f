"""Sockets between ranks of one machine: no other user calls, and whoever calls without being a rank is turned away."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
import time

import pytest

from freescale.comm.world.meeting.private_sockets import PrivateListener, call
from tests.other_user import as_other_user, only_root, unix_names

pytestmark = pytest.mark.timed


def connect(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(5)
        try:
            caller.connect(address)
        except OSError as error:
            return type(error).__name__
    return "connected"


@only_root
def test_another_user_cannot_even_connect():
    with PrivateListener(4) as listener:
        address, _ = listener.name.split()
        assert as_other_user(lambda: connect(address)) == "PermissionError"
        assert connect(address) == "connected"


def test_a_listener_has_no_name_and_leaves_no_file(tmp_path, monkeypatch):
    deep = tmp_path / ("long" * 30) / ("name" * 30)  # a path no socket takes
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with PrivateListener(1) as listener:
        assert list(deep.iterdir()) == []
        assert unix_names() == []
        calls = threading.Thread(target=call, args=(listener.name,), kwargs={"rank": 3, "timeout_s": 5})
        calls.start()
        assert list(listener.accept([3], timeout_s=10)) == [3]
        calls.join()


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_process_with_too_many_open_files_leaves_none_behind(tmp_path, monkeypatch, more):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + more, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            PrivateListener(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_strangers_are_turned_away_and_silent_ones_hold_nobody_up():
    before = open_files()
    with PrivateListener(16) as listener:
        address, _ = listener.name.split()
        silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in silent:
            each.connect(address)
        silent[0].sendall(b"half")
        silent[1].close()
        guess = call(f"{address} {'00' * 16}", rank=1, timeout_s=5)
        outside = call(listener.name, rank=9, timeout_s=5)
        first = call(listener.name, rank=1, timeout_s=5)
        again = call(listener.name, rank=1, timeout_s=5)
        second = call(listener.name, rank=2, timeout_s=5)
        began = time.monotonic()
        found = listener.accept([1, 2], timeout_s=30)
        assert time.monotonic() - began < 2
        assert sorted(found) == [1, 2]
        first.sendall(b"1")
        second.sendall(b"2")
        assert [found[rank].recv(1) for rank in (1, 2)] == [b"1", b"2"]
        for each in (guess, outside, again):
            each.settimeout(5)
            assert each.recv(1) == b""  # closed by the other side
        for each in (*silent, guess, outside, first, again, second, *found.values()):
            each.close()
    assert open_files() == before


def test_ranks_that_do_not_come_are_named():
    with PrivateListener(2) as listener:
        there = call(listener.name, rank=1, timeout_s=5)
        with pytest.raises(TimeoutError, match=r"ranks \[2, 3\] did not connect within 0 s"):
            listener.accept([1, 2, 3], timeout_s=0.3)
        there.close()


def test_a_silent_caller_is_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr("freescale.comm.world.meeting.private_sockets._HELLO_S", 0.05)
    with PrivateListener(2) as listener:
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(listener.name.split()[0])
        late = threading.Timer(0.3, call, args=(listener.name,), kwargs={"rank": 1, "timeout_s": 5})
        late.start()
        assert list(listener.accept([1], timeout_s=10)) == [1]
        silent.settimeout(5)
        assert silent.recv(1) == b""
        silent.close()
        late.join()


def test_a_stranger_who_listens_is_not_talked_to(tmp_path, monkeypatch):
    monkeypatch.setattr("freescale.comm.world.meeting.private_sockets.user_of", lambda connection: 12345)
    with PrivateListener(1) as listener, pytest.raises(PermissionError, match="another user listens"):
        call(listener.name, rank=1, timeout_s=5)
