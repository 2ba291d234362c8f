"""Tests against the clock wait for a machine that has its cores, and not for ever."""

from __future__ import annotations

import time

from tests.machine import Calm, Stolen


def test_it_waits_until_the_host_lends_the_cores():
    shares = iter([0.9, 0.5, 0.1, 0.9])
    calm = Calm(60.0, lambda: next(shares))
    calm.wait()
    assert next(shares) == 0.9  # looked three times
    assert calm.left_s < 60


def test_it_does_not_wait_longer_than_its_time():
    looks = []
    calm = Calm(0.05, lambda: looks.append(time.sleep(0.02)) or 1.0)
    calm.wait()
    assert 1 <= len(looks) <= 3
    calm.wait()
    assert len(looks) <= 3


def test_what_is_taken_is_a_share():
    stolen = Stolen()
    time.sleep(0.05)
    assert 0 <= stolen.share() <= 1
