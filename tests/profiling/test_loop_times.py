"""The line of the host's time over tokens, from a short run of small batches and one of large ones."""

from __future__ import annotations

import pytest

from freescale.profiling.loop_times import ShortRun, host_line


def test_the_line_goes_through_both_runs():
    line = host_line(ShortRun(2.0, 100.0, []), ShortRun(5.0, 700.0, []))
    assert line.fixed_ms + 100 * line.per_token_ms == pytest.approx(2.0)
    assert line.fixed_ms + 700 * line.per_token_ms == pytest.approx(5.0)


def test_a_host_that_hides_behind_more_work_counts_as_in_large_batches():
    line = host_line(ShortRun(4.5, 100.0, []), ShortRun(1.25, 40_000.0, []))
    assert (line.fixed_ms, line.per_token_ms) == (1.25, 0.0)


def test_no_host_takes_less_than_nothing():
    line = host_line(ShortRun(1.0, 500.0, []), ShortRun(9.0, 900.0, []))
    assert line.fixed_ms == 0.0
    assert 900 * line.per_token_ms == pytest.approx(9.0)
