"""Ranks that have ended are named, also where something else has failed because of it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from freescale.comm.world import processes
from freescale.comm.world.processes import Processes, naming_the_ended


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_an_error_names_a_rank_that_ends_a_little_later():
    with a_process() as child:
        others = Processes({4: child.pid})
        threading.Timer(0.2, child.kill).start()
        with (
            pytest.raises(ConnectionError, match=r"ranks \[4\] have ended") as caught,
            naming_the_ended(others),
        ):
            raise RuntimeError("connection closed by peer")
    assert "connection closed" in str(caught.value.__cause__)


def test_an_error_stays_what_it_is_where_all_ranks_live(monkeypatch):
    monkeypatch.setattr(processes, "_ENDING_S", 0.1)
    with a_process() as child:
        with pytest.raises(RuntimeError, match="out of memory"), naming_the_ended(Processes({1: child.pid})):
            raise RuntimeError("out of memory")
        child.kill()
