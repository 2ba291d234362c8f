"""Threads that look after something: while it is there, and not beyond the end of the program."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from freescale.comm.world.background_poll import poll_in_background

pytestmark = pytest.mark.timed


class Subject:
    """Counts the looks."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


def test_it_is_looked_at_until_nobody_holds_it() -> None:
    before = threading.active_count()
    subject = Subject()
    poll_in_background(subject, Subject.look, every_s=0.001)
    deadline = time.monotonic() + 10
    while subject.looks < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert subject.looks >= 3
    assert threading.active_count() == before + 1
    del subject
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_threads_end_before_the_interpreter_does() -> None:
    program = """
import atexit, threading
atexit.register(lambda: print("threads at the end:", threading.active_count()))  # called after what comes later
from freescale.comm.world.background_poll import poll_in_background
class Subject: pass
kept = Subject()
poll_in_background(kept, lambda subject: None, every_s=0.01)
print("threads before it:", threading.active_count())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines() == ["threads before it: 2", "threads at the end: 1"], result.stderr
