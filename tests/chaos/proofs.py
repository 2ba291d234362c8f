"""Two proofs that one campaign repeats many times: killed anywhere and resumed, on as many ranks and on others."""

from __future__ import annotations

import os
import signal
import time

from tests.chaos import workload
from tests.chaos.fault import Fault
from tests.chaos.programs import Program
from tests.chaos.trial import MOST_RANKS, Missed, Trial


def resumed_bit_by_bit(trial: Trial) -> None:
    """Two ranks, killed at any moment: losses, evaluations and the last checkpoint are those of the undisturbed run."""
    trial.num_ranks = 2
    kill_anywhere(trial)
    trial.must_resume()


def resumed_on_others(trial: Trial) -> None:
    """One to four ranks, killed at any moment, go on with another number of ranks on the same curve."""
    trial.num_ranks = trial.rng.randint(1, MOST_RANKS)
    kill_anywhere(trial)
    others = [number for number in range(1, MOST_RANKS + 1) if number != trial.num_ranks]
    trial.must_resume(nproc=trial.rng.choice(others))


def kill_anywhere(trial: Trial) -> None:
    """SIGKILL of one rank, of the launcher or of all, at a moment of the whole run: set-up and last step included.

    The moment is drawn as a step and a while after it began: on a busy machine times alone would all be set-up.
    """
    run = trial.train()
    span = trial.references[trial.num_ranks].seconds
    step = trial.rng.randint(-1, workload.STEPS - 1)
    while _furthest(trial) < step and run.poll() is None:
        time.sleep(0.005)
    time.sleep(trial.rng.uniform(0.0, 1.0 if step < 0 else 0.1) * span)
    if run.poll() is not None:
        raise Missed("the run was over")
    trial.strike()
    who = trial.rng.choice(("rank", "launcher", "all"))
    try:
        _kill(trial, run, who)
    except ProcessLookupError:
        raise Missed("the run was over") from None
    at = _furthest(trial)
    saved = [path.name for path in workload.checkpoints(trial.run)]
    trial.verdict.outcome = (
        f"{who} of {trial.num_ranks} ranks killed at step {at}, saved: {(saved or ['none'])[-1]}"
    )
    if run.wait(30.0) is None:
        trial.problem("hang", f"30 s after a kill: {run.said[-500:]!r}")
    elif run.code == 0:
        raise Missed("the run was over")
    trial.check_saved()


def _furthest(trial: Trial) -> int:
    """The step that some rank is in; -1 before the first."""
    return max(trial.rank_at(rank)[1] for rank in range(trial.num_ranks))


def _kill(trial: Trial, run: Program, who: str) -> None:
    pid = trial.rank_at(trial.rng.randrange(trial.num_ranks))[0]
    if who == "rank" and pid:
        os.kill(pid, signal.SIGKILL)
    elif who == "launcher":
        os.kill(run.pid, signal.SIGKILL)
    else:
        os.killpg(run.pid, signal.SIGKILL)


killed_and_resumed = Fault("killed-and-resumed", resumed_bit_by_bit)
killed_and_reshaped = Fault("killed-and-reshaped", resumed_on_others)
