"""Two machines, as far as their network is concerned, and a wire between them that fails."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale.errors import EXIT_PEER
from tests.chaos.fault import fault
from tests.chaos.programs import Program
from tests.chaos.trial import Trial
from tests.nodes import Node, nodes


@contextmanager
def two_nodes(trial: Trial, **wire: float) -> Iterator[list[Node]]:
    """Two machines; what their guard runs is no part of the trial, what is left on them is."""
    with nodes(2, **wire) as machines:
        trial.ignore_present_processes()
        yield machines
        left = [pid for machine in machines for pid in machine.pids()]
        deadline = time.monotonic() + 5.0
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = [pid for machine in machines for pid in machine.pids()]
        for machine in machines:
            for path in Path(f"/proc/{machine._holder}/root/dev/shm").iterdir():
                trial.problem("leftover", f"shared memory {path.name} on {machine.name}")
        for pid in left:
            trial.problem("leftover", f"process {pid} on a node")


def train_on(trial: Trial, machines: list[Node], *options: str) -> list[Program]:
    """Ranks in turn on both machines, as two launchers would start them."""
    programs = []
    for rank in range(trial.num_ranks):
        machine = machines[rank % 2]
        local = len(range(rank % 2, trial.num_ranks, 2))
        programs.append(
            trial.train_by_hand(
                rank,
                *options,
                hook=lambda machine=machine: enter(machine),  # type: ignore[misc]
                MASTER_ADDR=machines[0].name,
                LOCAL_RANK=str(rank // 2),
                LOCAL_WORLD_SIZE=str(local),
            )
        )
    return programs


def enter(machine: Node) -> None:
    """In a new process: be on this machine."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.getcwd()
    spaces = [
        os.open(f"/proc/{machine._holder}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "mnt")
    ]
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(here)


def must_all_survive(trial: Trial, ranks: list[Program], *, limit: float = 60.0) -> None:
    """Everybody goes on to the end; sums over machines have an order of their own."""
    for rank in ranks:
        trial.must_survive(rank, limit=limit, bits=False)


@fault(isolated=True)
def undisturbed_on_two_nodes(trial: Trial) -> None:
    """No fault: two machines are on the curve."""
    with two_nodes(trial) as machines:
        must_all_survive(trial, train_on(trial, machines))


@fault(isolated=True)
def link_blinks(trial: Trial) -> None:
    """The link is down for three seconds and comes back."""
    with two_nodes(trial) as machines:
        ranks = train_on(trial, machines)
        trial.until_step(ranks[0])
        trial.strike()
        machines[1].link_down()
        time.sleep(3.0)
        machines[1].link_up()
        must_all_survive(trial, ranks)


@fault(isolated=True)
def link_flaps(trial: Trial) -> None:
    """The link goes down and comes back again and again."""
    with two_nodes(trial) as machines:
        ranks = train_on(trial, machines)
        trial.until_step(ranks[0], trial.rng.randint(2, 8))
        trial.strike()
        for _ in range(trial.rng.randint(3, 8)):
            machines[1].link_down()
            time.sleep(trial.rng.random() * 0.3)
            machines[1].link_up()
            time.sleep(trial.rng.random() * 0.3)
        must_all_survive(trial, ranks)


@fault(isolated=True)
def link_down(trial: Trial) -> None:
    """The link is down for ever: each side names a rank of the other, and ends."""
    with two_nodes(trial) as machines:
        ranks = train_on(trial, machines, "comm.silent_s=4")
        trial.until_step(ranks[0])
        trial.strike()
        machines[1].link_down()
        for rank, program in enumerate(ranks):
            others = "|".join(str(other) for other in range(trial.num_ranks) if other % 2 != rank % 2)
            trial.must_end(program, says=f"rank ({others})\\b", codes={EXIT_PEER})
    trial.must_resume()


@fault(isolated=True)
def node_lost(trial: Trial) -> None:
    """A machine goes down with all its ranks: the others name one of them."""
    with two_nodes(trial) as machines:
        ranks = train_on(trial, machines, "comm.silent_s=4")
        trial.until_step(ranks[0])
        trial.strike()
        machines[1].link_down()
        for rank in range(1, trial.num_ranks, 2):
            os.kill(ranks[rank].pid, signal.SIGKILL)
            trial.must_end(ranks[rank], says="", codes={-signal.SIGKILL}, errors=0)
        for rank in range(0, trial.num_ranks, 2):
            trial.must_end(ranks[rank], says="rank (1|3)\\b", codes={EXIT_PEER})
    trial.must_resume()


@fault(isolated=True)
def kill_rank_on_other_node(trial: Trial) -> None:
    """SIGKILL of one rank of two machines: each of the others names it."""
    with two_nodes(trial) as machines:
        ranks = train_on(trial, machines)
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
def link_delayed(trial: Trial) -> None:
    """Every frame takes 20 ms."""
    with two_nodes(trial, delay_ms=20.0) as machines:
        must_all_survive(trial, train_on(trial, machines), limit=100.0)


@fault(isolated=True)
def link_loses(trial: Trial) -> None:
    """One frame in a hundred is lost."""
    with two_nodes(trial, loss=0.01) as machines:
        must_all_survive(trial, train_on(trial, machines), limit=100.0)


@fault(isolated=True)
def run_folder_not_shared(trial: Trial) -> None:
    """Each machine has a run folder of its own: refused before the first step."""
    with two_nodes(trial) as machines:
        other = trial.folder / "other"
        other.mkdir()
        os.symlink(trial.data, other / "data")
        ranks = []
        for rank in range(trial.num_ranks):
            machine = machines[rank % 2]
            ranks.append(
                trial.train_by_hand(
                    rank,
                    hook=lambda machine=machine: enter(machine),  # type: ignore[misc]
                    folder=other if rank % 2 else None,
                    MASTER_ADDR=machines[0].name,
                    LOCAL_RANK=str(rank // 2),
                    LOCAL_WORLD_SIZE=str(len(range(rank % 2, trial.num_ranks, 2))),
                )
            )
        trial.strike()
        for program in ranks:
            trial.must_end(program, says="run.out.*(shared|see)")
    trial.must_resume()
