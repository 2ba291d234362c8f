"""Ranks that something else starts: late, twice, never, otherwise."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

from freescale.errors import EXIT_ERROR, EXIT_PEER
from tests.chaos.fault import fault
from tests.chaos.programs import Program
from tests.chaos.trial import FAILED, Trial
from tests.chaos.workload import STEPS

OTHER_KEYS = (
    "embedding.lr=0.5",
    "optim.lr=0.5",
    "model.dim=16",
    "model.layers=2",
    "embedding.optimizer=sgd",
    "ffn.kind=dense",
    "run.seed=9",
    "data.global_batch=24",
    "pipeline.prioritized=false",
    "run.steps=12",
    "run.checkpoint_every=5",
    "balance.enabled=false",
)


def all_ranks(trial: Trial) -> list[Program]:
    """Every rank, by hand."""
    return [trial.train_by_hand(rank) for rank in range(trial.num_ranks)]


def must_all_end(trial: Trial, ranks: list[Program], *, says: str) -> None:
    """Each ends with one message of its own, and at least one says this."""
    for rank in ranks:
        trial.must_end(rank, says="rank|error")
    if not any(re.search(says, rank.said, re.IGNORECASE | re.DOTALL) for rank in ranks):
        trial.problem("message", f"nobody says {says!r}: {[rank.said[-300:] for rank in ranks]}")


@fault(isolated=True)
def undisturbed_by_hand(trial: Trial) -> None:
    """No fault: ranks started by hand are on the curve, too."""
    for rank in all_ranks(trial):
        trial.must_survive(rank)


@fault(isolated=True, quick=True)
def kill_rank_by_hand(trial: Trial) -> None:
    """SIGKILL of one rank of a job without our launcher: each of the others names it."""
    ranks = all_ranks(trial)
    pid = trial.until_step(ranks[0])
    trial.strike()
    os.kill(pid, signal.SIGKILL)
    for rank, program in enumerate(ranks):
        if rank == trial.victim:
            trial.must_end(program, says="", codes={-signal.SIGKILL}, errors=0)
        else:
            trial.must_end(program, says=f"rank {trial.victim}\\b", codes={EXIT_PEER})
    trial.must_resume()


@fault(isolated=True)
def stop_rank_by_hand(trial: Trial) -> None:
    """SIGSTOP of one rank for ever, without our launcher: the others name it and end."""
    ranks = [trial.train_by_hand(rank, "comm.silent_s=4") for rank in range(trial.num_ranks)]
    pid = trial.until_step(ranks[0])
    trial.strike()
    os.kill(pid, signal.SIGSTOP)
    for rank, program in enumerate(ranks):
        if rank != trial.victim:
            trial.must_end(program, says=f"rank {trial.victim}\\b.*silent", codes={EXIT_PEER})
    os.kill(pid, signal.SIGCONT)
    trial.must_end(ranks[trial.victim], says="rank", codes=FAILED)
    trial.must_resume()


@fault(isolated=True)
def other_recipe_on_one_rank(trial: Trial) -> None:
    """One rank was started with another recipe: refused by rank and key, on all of them."""
    key = trial.rng.choice(OTHER_KEYS)
    ranks = [
        trial.train_by_hand(rank, *([key] if rank == trial.victim else [])) for rank in range(trial.num_ranks)
    ]
    trial.strike()
    must_all_end(trial, ranks, says=f"disagree.*{re.escape(key.partition('=')[0])}")
    trial.must_resume()


@fault(isolated=True)
def other_version_on_one_rank(trial: Trial) -> None:
    """One rank runs another version of freescale."""

    def other() -> None:
        import sys

        import freescale

        old = freescale.__version__
        for module in list(sys.modules.values()):
            if getattr(module, "__version__", None) == old and module.__name__.startswith("freescale"):
                module.__version__ = "0.0.9"  # type: ignore[attr-defined]

    ranks = [
        trial.train_by_hand(rank, hook=other if rank == trial.victim else None)
        for rank in range(trial.num_ranks)
    ]
    trial.strike()
    must_all_end(trial, ranks, says="disagree.*(version|freescale)")
    trial.must_resume()


@fault(isolated=True)
def other_torch_on_one_rank(trial: Trial) -> None:
    """One rank runs another version of torch."""

    def other() -> None:
        import torch

        torch.__version__ = "2.0.0"  # type: ignore[assignment]

    ranks = [
        trial.train_by_hand(rank, hook=other if rank == trial.victim else None)
        for rank in range(trial.num_ranks)
    ]
    trial.strike()
    must_all_end(trial, ranks, says="disagree.*torch")
    trial.must_resume()


@fault(isolated=True)
def late_rank(trial: Trial) -> None:
    """One rank comes seconds after the others: they wait for it."""
    order = [rank for rank in range(trial.num_ranks) if rank != trial.victim]
    ranks = [trial.train_by_hand(rank) for rank in order]
    time.sleep(trial.rng.uniform(4.0, 10.0))
    trial.strike()
    ranks.append(trial.train_by_hand(trial.victim))
    for rank in ranks:
        trial.must_survive(rank)


@fault(isolated=True)
def rank_twice(trial: Trial) -> None:
    """Two processes say that they are the same rank: the later one is refused, or all end; nobody hangs."""
    ranks = all_ranks(trial)
    time.sleep(trial.rng.random() * 2.0)
    trial.strike()
    twin = trial.train_by_hand(trial.victim, "comm.timeout_s=10")
    trial.must_end(twin, says="rank|taken|join|address|already")
    if all(rank.wait(30.0) == 0 for rank in ranks):
        for rank in ranks:
            trial.must_survive(rank)
        return
    for rank in ranks:
        trial.must_end(rank, says=f"rank {trial.victim}\\b|twice")
    trial.must_resume()


@fault(isolated=True)
def rank_never_comes(trial: Trial) -> None:
    """One rank is never started: the others say for whom they wait, and end after comm.timeout_s."""
    order = [rank for rank in range(trial.num_ranks) if rank != trial.victim]
    trial.strike()
    ranks = [trial.train_by_hand(rank, "comm.timeout_s=8") for rank in order]
    for rank in ranks:
        trial.must_end(rank, says="rank|join")
    trial.must_resume()


@fault(isolated=True)
def wrong_world_size(trial: Trial) -> None:
    """One rank was told another number of ranks."""
    trial.strike()
    ranks = [
        trial.train_by_hand(
            rank,
            "comm.timeout_s=8",
            **({"WORLD_SIZE": str(trial.num_ranks + 1)} if rank == trial.victim else {}),
        )
        for rank in range(trial.num_ranks)
    ]
    for rank in ranks:
        trial.must_end(rank, says="rank|join|WORLD_SIZE")
    trial.must_resume()


@fault(isolated=True)
def port_taken(trial: Trial) -> None:
    """Another program listens at MASTER_PORT and says nothing."""
    with socket.create_server(("127.0.0.1", 29500)):
        trial.strike()
        ranks = [trial.train_by_hand(rank, "comm.timeout_s=8") for rank in range(trial.num_ranks)]
        for rank in ranks:
            trial.must_end(rank, says="port|address|29500|join")
    trial.must_resume()


@fault(isolated=True)
def wrong_master_address(trial: Trial) -> None:
    """MASTER_ADDR names nobody, or a machine without a route to it."""
    address = trial.rng.choice(("no-such-host.invalid", "192.0.2.1"))
    trial.strike()
    ranks = [
        trial.train_by_hand(rank, "comm.timeout_s=8", **({"MASTER_ADDR": address} if rank else {}))
        for rank in range(trial.num_ranks)
    ]
    for rank in ranks:
        trial.must_end(rank, says="rank|join|address|host")
    trial.must_resume()


@fault()
def two_trainings(trial: Trial) -> None:
    """A second training is started in the same folder: refused; the first goes on."""
    step = trial.rng.randint(2, STEPS)
    trial.hold_at(step)
    run = trial.train()
    trial.until_step(run, step)
    trial.strike()
    second = trial.train()
    trial.must_end(second, says="already going on", codes={EXIT_ERROR})
    trial.hold_at(0)
    trial.must_survive(run)
