"""Lines over tokens, from a short run of small batches and one of large ones."""

from __future__ import annotations

import pytest

from freescale.profiling.loop_times import line_over_tokens


def test_the_line_goes_through_both_runs():
    line = line_over_tokens((100.0, 700.0), (2.0, 5.0))
    assert line.fixed_ms + 100 * line.per_token_ms == pytest.approx(2.0)
    assert line.fixed_ms + 700 * line.per_token_ms == pytest.approx(5.0)


def test_a_host_that_hides_behind_more_work_counts_as_in_large_batches():
    line = line_over_tokens((100.0, 40_000.0), (4.5, 1.25))
    assert (line.fixed_ms, line.per_token_ms) == (1.25, 0.0)


def test_nothing_takes_less_than_no_time():
    line = line_over_tokens((500.0, 900.0), (1.0, 9.0))
    assert line.fixed_ms == 0.0
    assert 900 * line.per_token_ms == pytest.approx(9.0)
