"""Processes are killed, stopped and told to end, anywhere in a run."""

from __future__ import annotations

import os
import signal
import time

from freescale.errors import EXIT_PREEMPTED
from tests.chaos.fault import fault
from tests.chaos.programs import Program
from tests.chaos.sandbox import descendants
from tests.chaos.trial import FAILED, MOST_RANKS, Missed, Trial
from tests.chaos.workload import EVALUATED_EVERY, STEPS, checkpoints, step_name


def end_rank(trial: Trial, run: Program, number: int) -> None:
    """A rank dies by a signal: the run names it and the signal."""
    trial.strike()
    os.kill(trial.rank_at(trial.victim)[0], number)
    trial.must_end(run, says=f"rank {trial.victim}\\b.*{signal.Signals(number).name}")


@fault()
def kill_rank(trial: Trial) -> None:
    """SIGKILL of one rank in a step."""
    run = trial.train()
    trial.until_step(run)
    end_rank(trial, run, signal.SIGKILL)
    trial.must_resume()


@fault()
def kill_rank_from_cold(trial: Trial) -> None:
    """SIGKILL of one rank of the true command, nothing imported before."""
    run = trial.train(cold=True)
    trial.until(lambda: len(descendants(run.pid)) >= trial.num_ranks, of=run)
    ranks = sorted(descendants(run.pid))
    time.sleep(trial.rng.random() * 6.0)
    if run.poll() is not None:
        raise Missed("the run was over")
    trial.strike()
    os.kill(ranks[trial.victim], signal.SIGKILL)
    trial.must_end(run, says=f"rank {trial.victim}\\b.*SIGKILL")
    trial.must_resume()


@fault()
def kill_rank_in_set_up(trial: Trial) -> None:
    """SIGKILL of one rank before its first step."""
    run = trial.train()
    trial.until_ranks_start(run)
    time.sleep(trial.rng.random() * 0.8)
    end_rank(trial, run, signal.SIGKILL)
    trial.must_resume()


@fault()
def kill_rank_in_evaluation(trial: Trial) -> None:
    """SIGKILL of one rank while the model is evaluated."""
    run = trial.train()
    step = EVALUATED_EVERY * trial.rng.randint(1, STEPS // EVALUATED_EVERY - 1)
    trial.until_step(run, step)
    end_rank(trial, run, signal.SIGKILL)
    trial.must_resume()


@fault(quick=True)
def kill_rank_in_checkpoint(trial: Trial) -> None:
    """SIGKILL of one rank while a checkpoint is half written to a slow disk."""
    run = trial.train(hook=slow_disk)
    trial.until_step(run)
    trial.until(lambda: any((trial.run / "checkpoints").glob("*.tmp")), of=run)
    time.sleep(trial.rng.random() * 0.1)
    end_rank(trial, run, signal.SIGKILL)
    trial.must_resume()


def slow_disk() -> None:
    """In a rank: what waits for the disk waits longer."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.05)
        fsync(descriptor)

    os.fsync = slow


@fault()
def kill_all_ranks(trial: Trial) -> None:
    """SIGKILL of every rank at once, as the system does when memory is short."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    for rank in range(trial.num_ranks):
        os.kill(trial.rank_at(rank)[0], signal.SIGKILL)
    trial.must_end(run, says="rank \\d.*SIGKILL")
    trial.must_resume()


@fault()
def kill_launcher(trial: Trial) -> None:
    """SIGKILL of the launcher: its ranks go with it."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    os.kill(run.pid, signal.SIGKILL)
    trial.must_end(run, says="", codes={-signal.SIGKILL}, errors=0)
    trial.must_resume()


@fault()
def kill_everything(trial: Trial) -> None:
    """SIGKILL of launcher and ranks, as when the machine goes down, at any moment."""
    run = trial.train()
    trial.until_ranks_start(run)
    time.sleep(trial.rng.random() * trial.references[trial.num_ranks].seconds * 0.8)
    if run.poll() is None:
        trial.strike()
        os.killpg(run.pid, signal.SIGKILL)
        trial.must_end(run, says="", codes={-signal.SIGKILL}, errors=0)
    trial.must_resume()


@fault()
def kill_twice(trial: Trial) -> None:
    """A resumed run is killed, too."""
    for first in (2, STEPS // 2):
        run = trial.train()
        trial.until_step(run, trial.rng.randint(first, first + STEPS // 3))
        end_rank(trial, run, signal.SIGKILL)
        trial.forget_ranks()
    trial.must_resume()


@fault()
def kill_and_reshape(trial: Trial) -> None:
    """Killed on some ranks, resumed on others."""
    run = trial.train()
    trial.until_step(run)
    end_rank(trial, run, signal.SIGKILL)
    others = [n for n in range(1, MOST_RANKS + 1) if n != trial.num_ranks]
    trial.must_resume(nproc=trial.rng.choice(others))


@fault()
def kill_loader(trial: Trial) -> None:
    """SIGKILL of a process that loads batches for a rank."""
    run = trial.train("data.workers=1")
    pid = trial.until_step(run)
    loaders = list(descendants(pid))
    if loaders:
        trial.strike()
        os.kill(trial.rng.choice(loaders), signal.SIGKILL)
    if not trial.must_end_or_survive(run, says="loader|worker"):
        trial.must_resume("data.workers=1")


@fault()
def segmentation_fault(trial: Trial) -> None:
    """A rank dies by SIGSEGV."""
    run = trial.train()
    trial.until_step(run)
    end_rank(trial, run, signal.SIGSEGV)
    trial.must_resume()


@fault()
def abort(trial: Trial) -> None:
    """A rank dies by SIGABRT."""
    run = trial.train()
    trial.until_step(run)
    end_rank(trial, run, signal.SIGABRT)
    trial.must_resume()


@fault(quick=True)
def terminate_launcher(trial: Trial) -> None:
    """SIGTERM to the launcher, as a scheduler sends it: the state is saved, the code says so."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    os.kill(run.pid, signal.SIGTERM)
    must_save(trial, run)
    trial.must_resume()


@fault()
def terminate_rank(trial: Trial) -> None:
    """SIGTERM to one rank: all of them save and end."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    os.kill(trial.rank_at(trial.victim)[0], signal.SIGTERM)
    must_save(trial, run)
    trial.must_resume()


@fault()
def terminate_everything(trial: Trial) -> None:
    """SIGTERM to launcher and ranks, twice, as an impatient scheduler sends it."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    for _ in range(2):
        os.killpg(run.pid, signal.SIGTERM)
        time.sleep(trial.rng.random() * 0.1)
    must_save(trial, run)
    trial.must_resume()


@fault()
def terminate_in_set_up(trial: Trial) -> None:
    """SIGTERM before the first step: there may be nothing to save, and that is said."""
    run = trial.train()
    trial.until_ranks_start(run)
    time.sleep(trial.rng.random() * 0.8)
    trial.strike()
    os.kill(run.pid, signal.SIGTERM)
    trial.must_end(run, says="stop|saved|SIGTERM", codes={EXIT_PREEMPTED, -signal.SIGTERM}, errors=0)
    trial.must_resume()


def must_save(trial: Trial, run: Program) -> None:
    """The run ends as preempted, and has saved where it was."""
    at = max(trial.rank_at(rank)[1] for rank in range(trial.num_ranks))
    trial.must_end(run, says="saved", codes={EXIT_PREEMPTED}, errors=0)
    if run.code == EXIT_PREEMPTED and not any(c.name >= step_name(at - 2) for c in checkpoints(trial.run)):
        trial.problem(
            "lost checkpoint", f"preempted at step {at}, saved {[c.name for c in checkpoints(trial.run)]}"
        )


@fault()
def stop_and_continue(trial: Trial) -> None:
    """SIGSTOP of one rank for three seconds: the others wait, and nothing is different afterwards."""
    run = trial.train()
    pid = trial.until_step(run)
    trial.strike()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(pid, signal.SIGCONT)
    trial.must_survive(run)


@fault()
def stop_for_ever(trial: Trial) -> None:
    """SIGSTOP of one rank: the others say who is silent, and end."""
    run = trial.train(*silent_after(4))
    pid = trial.until_step(run)
    trial.strike()
    os.kill(pid, signal.SIGSTOP)
    trial.must_end(run, says=f"rank {trial.victim}\\b.*silent", codes=FAILED)
    trial.must_resume()


def silent_after(seconds: int) -> list[str]:
    """How long a rank may be silent, in trials where one is for ever."""
    return [f"comm.silent_s={seconds}"]


@fault()
def interrupt(trial: Trial) -> None:
    """Ctrl-C: every process gets SIGINT."""
    run = trial.train()
    trial.until_step(run)
    trial.strike()
    os.killpg(run.pid, signal.SIGINT)
    trial.must_end(run, says="stopped", codes={130}, errors=0)
    trial.must_resume()
