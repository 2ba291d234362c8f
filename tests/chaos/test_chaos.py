"""Runs broken on purpose end right: a few kinds of fault in CI, all of them where minutes are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Ground, ground, run_trials
from tests.chaos.faults import FAULTS
from tests.chaos.programs import preload
from tests.chaos.proofs import killed_and_reshaped, killed_and_resumed
from tests.chaos.trial import Verdict

pytestmark = pytest.mark.timed

SEED = 24


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ground]:
    preload()
    with ground(most_ranks=2) as made:
        yield made


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ground]:
    preload()
    with ground(most_ranks=4) as made:
        yield made


def told(verdict: Verdict) -> str:
    problems = "\n".join(f"{problem.kind}: {problem.seen}" for problem in verdict.problems)
    return f"{verdict.trial} (python benchmarks/chaos.py --seed {SEED} --ranks 2 --repeat {verdict.trial})\n{problems}"


@pytest.mark.parametrize("kind", [name for name, fault in FAULTS.items() if fault.quick])
def test_a_run_that_is_disturbed_ends_right(kind: str, two_ranks: Ground) -> None:
    if FAULTS[kind].isolated and not two_ranks.isolated:
        pytest.skip("no namespaces here")
    for verdict in run_trials(two_ranks, [(FAULTS[kind], 0)], seed=SEED):
        assert not verdict.problems, told(verdict)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_fault_ends_right(kind: str, four_ranks: Ground) -> None:
    if FAULTS[kind].isolated and not four_ranks.isolated:
        pytest.skip("no namespaces here")
    for verdict in run_trials(
        four_ranks, [(FAULTS[kind], number) for number in range(1, 4)], seed=SEED, jobs=2
    ):
        assert not verdict.problems, told(verdict)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proof", [killed_and_resumed, killed_and_reshaped], ids=lambda proof: proof.name)
def test_killed_anywhere_and_resumed(proof: object, four_ranks: Ground) -> None:
    for verdict in run_trials(four_ranks, [(proof, number) for number in range(10)], seed=SEED, jobs=2):
        assert not verdict.problems, told(verdict)


def test_another_curve_is_noticed(two_ranks: Ground) -> None:
    """The judge itself: a run that learnt something else must not pass."""
    from tests.chaos.faults import Fault
    from tests.chaos.trial import Trial

    def story(trial: Trial) -> None:
        trial.must_survive(trial.train("optim.lr=0.0011"))

    (verdict,) = run_trials(two_ranks, [(Fault("other-curve", story), 0)], seed=SEED)
    assert "wrong curve" in {problem.kind for problem in verdict.problems}


def test_what_is_left_behind_is_noticed(two_ranks: Ground) -> None:
    """The judge itself: a process, a temporary file, and a checkpoint that is gone."""
    import os
    import shutil
    import time

    from tests.chaos.faults import Fault
    from tests.chaos.faults.checkpoints import killed_run
    from tests.chaos.trial import Trial

    def story(trial: Trial) -> None:
        latest = killed_run(trial)
        trial.strike()
        shutil.rmtree(latest)
        (trial.temporary / "forgotten").touch()
        if os.fork() == 0:
            time.sleep(60)
        trial.check_saved()

    (verdict,) = run_trials(two_ranks, [(Fault("untidy", story), 0)], seed=SEED)
    seen = {problem.kind for problem in verdict.problems}
    assert seen == {"lost checkpoint", "leftover"}
    assert {p.seen.split()[0] for p in verdict.problems if p.kind == "leftover"} == {"process", "temporary"}
