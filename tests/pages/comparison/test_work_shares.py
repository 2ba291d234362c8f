"""How evenly work was shared, by CPU time: known of CPU ranks, sure where steps agree."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from freescale.pages.comparison.compare import render_comparison
from freescale.pages.comparison.compared_runs import read_runs
from freescale.pages.comparison.work_shares import compare_work, work_of_steps
from freescale.trace import KeptStep, Parts, RankSpans, RunSpans
from tests.pages.comparison.test_compare import write_run
from tests.pages.test_report import Page


def spans(cpu: list[list[float | None]]) -> RunSpans:
    """cpu[rank][step - 1]."""
    parts = Parts(1.0, 1.0, 0.0, 0.0)
    return RunSpans(
        [
            RankSpans(
                rank,
                {},
                {
                    step: KeptStep(step, 0.0, 1.0, parts, cpu=value)
                    for step, value in enumerate(steps, start=1)
                },
            )
            for rank, steps in enumerate(cpu)
        ]
    )


def test_work_is_that_of_the_busiest_rank_and_of_the_mean_one():
    assert work_of_steps(spans([[3.0, 1.0], [1.0, 1.0]])) == {1: (3.0, 2.0), 2: (1.0, 1.0)}


@pytest.mark.parametrize("cpu", [[[1.0]], [[None], [1.0]], [[None], [None]], [[0.0], [0.0]]])
def test_one_rank_and_ranks_on_devices_have_none(cpu):
    assert work_of_steps(spans(cpu)) == {}


def test_a_difference_is_told_with_what_it_may_be():
    rng = random.Random(1)
    uneven = {step: (1.0 + rng.uniform(0.3, 0.5), 1.0) for step in range(1, 61)}
    even = {step: (1.0 + rng.uniform(0.0, 0.1), 1.0) for step in range(1, 61)}
    found = compare_work(uneven, even)
    assert found.before == pytest.approx(1.4, abs=0.03)
    assert found.after == pytest.approx(1.05, abs=0.02)
    assert found.verdict().startswith("more even, ")
    assert compare_work(even, uneven).verdict().startswith("less even, ")
    assert compare_work(uneven, dict(uneven)).verdict() == "no difference beyond noise"


def test_few_steps_and_no_steps_say_so():
    few = dict.fromkeys(range(1, 6), (1.5, 1.0))
    assert compare_work(few, few).verdict() == "too few steps to tell"
    assert compare_work(few, {}) is None


def test_three_runs_have_their_work_in_the_table(tmp_path):
    """With two runs it is on a card; with more it was on the terminal alone."""
    rng = random.Random(2)
    folders = [write_run(tmp_path / name, straggler=0.2) for name in ("off", "on", "gpu")]
    excess = ((0.3, 0.5), (0.0, 0.1))
    work = [{step: (1 + rng.uniform(*ends), 1.0) for step in range(1, 61)} for ends in excess]
    runs = [replace(run, work=known) for run, known in zip(read_runs(folders), (*work, {}))]
    text = Page(render_comparison(runs)).text
    assert "work of the busiest rank over the mean, CPU time" in text
    assert re.search(r"off .* 1\.4\d\d on .* 1\.0\d\d: more even, .* less above 1 gpu .* - ", text)
    assert "busiest rank" not in Page(render_comparison(read_runs(folders))).text
    assert "over the mean, CPU time" not in Page(render_comparison(runs[:2])).text, "it is on a card"
