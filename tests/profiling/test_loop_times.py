"""Lines over tokens, from a short run of small batches and one of large ones; what a step costs the host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from freescale.profiling import loop_times
from freescale.profiling.loop_times import line_over_tokens
from freescale.recipe import load_config
from freescale.train.accounts.notes import Notes
from tests.pipeline.loading.test_ahead import threads_ahead
from tests.ranks import run_on_ranks
from tests.small_run import SMALL, these_ranks


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


def host_with_dear_accounts(rank: int, cpu_s: float, folder: Path) -> float:
    """The host's milliseconds of a step of two ranks, each of whose accounts computes for so long."""
    compare = Notes.compare

    def dear(self: Notes, *args: Any, **options: Any) -> int:
        until = time.thread_time() + cpu_s
        while time.thread_time() < until:
            pass
        return compare(self, *args, **options)

    Notes.compare = dear  # in this process alone
    config = load_config(None, SMALL)
    return loop_times.short_run(config, these_ranks(), samples=2, hiding=False, folder=folder).host_ms


def test_accounts_at_log_steps_are_part_of_what_a_step_costs_the_host(tmp_path: Path):
    """Ranks stand still for them: the simulator would not know, since they are neither compute nor a transfer."""
    first, _ = run_on_ranks(host_with_dear_accounts, 2, 0.34, tmp_path)
    assert first > 1000 * 2 * 0.34 / 34  # one account of the first step, and one of all others


def test_the_usual_host_of_cpu_ranks_is_that_of_half_of_the_steps():
    steps = [4.0, 9.0, 5.0, 6.0, 30.0]
    assert loop_times.usual_host_ms(steps, on_cpu=True) == 6.0
    assert loop_times.usual_host_ms(steps, on_cpu=False) == 5.0


@pytest.mark.parametrize("hiding", [False, True])
def test_one_rank_makes_batches_ready_beside_its_compute_where_traffic_is_hidden(
    hiding: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Loading counts as the host's time in a schedule that loads in turn, and nowhere else."""
    seen = []
    take = loop_times.take_steps

    def watched(run: Any, schedule: Any) -> None:
        step = run.train_step.run

        def one(*args: Any, **options: Any) -> Any:
            seen.append(bool(threads_ahead()))
            return step(*args, **options)

        monkeypatch.setattr(run.train_step, "run", one)
        take(run, schedule)

    monkeypatch.setattr(loop_times, "take_steps", watched)
    loop_times.short_run(load_config(None, SMALL), these_ranks(), samples=2, hiding=hiding, folder=tmp_path)
    assert set(seen) == {hiding}


def test_nothing_is_postponed_where_rows_beside_the_compute_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A replay that updates its layers would seem to compute longer than one beside which no rows travel."""
    seen = []
    build = loop_times.build_run
    monkeypatch.setattr(
        loop_times, "build_run", lambda config, *given: (seen.append(config), build(config, *given))[1]
    )
    config = load_config(None, [*SMALL, "pipeline.postpone=on"])
    loop_times.short_run(config, these_ranks(), samples=2, hiding=True, folder=tmp_path)
    assert [one.pipeline.postpone for one in seen] == ["off"]
