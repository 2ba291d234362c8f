"""Others look at a run while it trains."""

from __future__ import annotations

from tests.chaos.fault import fault
from tests.chaos.trial import Trial
from tests.chaos.workload import EVALUATED_EVERY, STEPS


def read_during(trial: Trial, *command: str) -> None:
    """Start a command that reads beside a training that is saving; both must end well."""
    run = trial.train()
    trial.until_step(run, trial.rng.randint(EVALUATED_EVERY + 1, STEPS - 3))
    trial.strike()
    reader = trial.start(*command)
    code = reader.wait(60.0)
    if code != 0:
        trial.problem("did not survive", f"{command[0]}: {code}: {reader.said[-800:]}")
    trial.must_survive(run)


@fault()
def evaluate_in_a_step(trial: Trial) -> None:
    """`freescale evaluate` of a run that trains."""
    read_during(trial, "evaluate", "run", "--json")


@fault()
def export_in_a_step(trial: Trial) -> None:
    """`freescale export` of a run that trains."""
    read_during(trial, "export", "run", "exported")


@fault()
def report_in_a_step(trial: Trial) -> None:
    """`freescale report` of a run that trains."""
    read_during(trial, "report", "run")
