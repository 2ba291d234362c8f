"""What goes wrong inside a rank: a loss that is no number, an error nobody foresaw, a clock that jumps."""

from __future__ import annotations

import os
import time
from typing import Any

from freescale.errors import EXIT_UNEXPECTED
from tests.chaos.fault import fault
from tests.chaos.trial import Trial
from tests.chaos.workload import STEPS


def in_step(trial: Trial, what: Any) -> Any:
    """A hook that does something in one step of the victim: what(loss) is what the step goes on with."""
    at, victim = trial.rng.randint(2, STEPS - 2), str(trial.victim)

    def hook() -> None:
        from freescale.model import Recommender

        forward, calls = Recommender.forward, iter(range(1, 10**9))

        def spoilt(self: Any, *args: Any, **options: Any) -> Any:
            loss = forward(self, *args, **options)
            return what(loss) if next(calls) == at else loss

        if os.environ.get("RANK") == victim:
            Recommender.forward = spoilt  # type: ignore[method-assign]

    return hook


@fault()
def loss_not_finite(trial: Trial) -> None:
    """One rank's loss is NaN: the run ends before anything of it is saved."""
    run = trial.train(hook=in_step(trial, lambda loss: loss * float("nan")))
    trial.must_end(run, says="nan|not finite|no number", limit=60)
    trial.must_resume()


@fault()
def error_in_a_rank(trial: Trial) -> None:
    """An error nobody foresaw, in one rank: one traceback, of the rank that failed, and its own exit code."""

    def fail(loss: Any) -> Any:
        raise trial.rng.choice((RuntimeError, KeyError, ValueError, AssertionError))("planted")

    run = trial.train(hook=in_step(trial, fail))
    trial.must_end_with_traceback(run, says=f"rank {trial.victim}\\b.*planted", codes={EXIT_UNEXPECTED})
    trial.must_resume()


@fault()
def out_of_memory(trial: Trial) -> None:
    """Memory runs out in one rank, as Python says it."""

    def fail(loss: Any) -> Any:
        raise MemoryError("planted")

    run = trial.train(hook=in_step(trial, fail))
    trial.must_end_with_traceback(run, says=f"rank {trial.victim}\\b", codes={EXIT_UNEXPECTED, 1})
    trial.must_resume()


@fault()
def clock_jumps(trial: Trial) -> None:
    """The wall clock of one rank jumps by hours, forth or back: nothing is timed by it."""
    jump = trial.rng.choice((-1, 1)) * trial.rng.uniform(3600, 10 * 3600)

    def leap(loss: Any) -> Any:
        now = time.time
        time.time = lambda: now() + jump
        return loss

    trial.must_survive(trial.train(hook=in_step(trial, leap)))


@fault()
def slow_rank(trial: Trial) -> None:
    """One rank stalls for two seconds in a step."""

    def stall(loss: Any) -> Any:
        time.sleep(2.0)
        return loss

    trial.must_survive(trial.train(hook=in_step(trial, stall)))
