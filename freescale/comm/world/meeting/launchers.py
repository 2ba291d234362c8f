"""What each launcher says of a process in the environment: torchrun and its like, MPI, Slurm, Kubernetes."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freescale.errors import TrainingError

_PORTS = range(15_000, 30_000)
"""Derived ports: below those that Linux gives to outgoing connections and Kubernetes to services."""

_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")
"""Variables that are the same for all processes of one mpirun; the first that is set names the job."""


@dataclass(frozen=True)
class Membership:
    """One process of a run.

    Args:
        launcher: who says so; "" for a process that was started alone.
        rank: this process.
        num_ranks: all processes.
        local_rank: its number on its machine; None if nobody says.
        local_num_ranks: processes on this machine; None if nobody says.
        node: number of its machine; None if nobody says.
        master: host on which rank 0 waits for the others; None if nobody says.
        port: where it does.
    """

    launcher: str = ""
    rank: int = 0
    num_ranks: int = 1
    local_rank: int | None = None
    local_num_ranks: int | None = None
    node: int | None = None
    master: str | None = None
    port: int | None = None

    @property
    def alone(self) -> bool:
        """Whether nobody else takes part and no process group is needed."""
        return not self.launcher

    @property
    def one_machine(self) -> bool:
        """Whether the launcher says that all ranks run on this machine."""
        return self.local_num_ranks == self.num_ranks


def first_host(hosts: str) -> str:
    """The first of a Slurm list of hosts: `node[01-04,07],login` -> node01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        raise TrainingError("a list of hosts is empty", got=repr(hosts), next_step="set MASTER_ADDR yourself")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's short form for the tasks of each node: `2(x3),1` -> [2, 2, 2, 1]."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in counts.split(",")]
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def slurm_node(environment: Mapping[str, str] = os.environ) -> tuple[int, int, str, int] | None:
    """(nodes, this node, host of the first, port) of a Slurm step with one task a node; None in any other."""
    who = _slurm(environment)
    if who is None or who.node is None or who.master is None or who.port is None:
        return None
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if not counts or any(count != 1 for count in counts):
        return None
    return len(counts), who.node, who.master, who.port


def _variables(environment: Mapping[str, str]) -> Membership | None:
    """RANK and WORLD_SIZE: `freescale train`, torchrun, Ray Train, a script."""
    if "RANK" not in environment:
        return None
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
    return Membership(
        launcher="freescale train" if "FREESCALE_LAUNCHER_LINE" in environment else by,
        rank=_needed(environment, "RANK", beside="RANK"),
        num_ranks=_needed(environment, "WORLD_SIZE", beside="RANK"),
        local_rank=number_in(environment, "LOCAL_RANK"),
        local_num_ranks=number_in(environment, "LOCAL_WORLD_SIZE"),
        node=number_in(environment, "GROUP_RANK", "NODE_RANK"),
    )


def _open_mpi(environment: Mapping[str, str]) -> Membership | None:
    prefix = "OMPI_COMM_WORLD"
    if f"{prefix}_RANK" not in environment:
        return None
    return _mpi(
        environment,
        launcher="Open MPI",
        rank=f"{prefix}_RANK",
        size=f"{prefix}_SIZE",
        local=(f"{prefix}_LOCAL_RANK",),
        local_size=(f"{prefix}_LOCAL_SIZE",),
    )


def _pmi(environment: Mapping[str, str]) -> Membership | None:
    """MPICH, Intel MPI and what else starts processes with Hydra or the process management interface."""
    if "PMI_RANK" not in environment:
        return None
    return _mpi(
        environment,
        launcher="MPI (PMI)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )


def _mpi(
    environment: Mapping[str, str],
    *,
    launcher: str,
    rank: str,
    size: str,
    local: tuple[str, ...],
    local_size: tuple[str, ...],
) -> Membership | None:
    num_ranks = _needed(environment, size, beside=rank)
    if num_ranks == 1:
        return None
    local_num_ranks = number_in(environment, *local_size)
    here = local_num_ranks == num_ranks
    # mpirun starts rank 0 on the first machine of an allocation.
    hosts = environment.get("SLURM_JOB_NODELIST")
    return Membership(
        launcher=launcher,
        rank=_needed(environment, rank, beside=size),
        num_ranks=num_ranks,
        local_rank=number_in(environment, *local),
        local_num_ranks=local_num_ranks,
        master="127.0.0.1" if here else first_host(hosts) if hosts else None,
        port=_port_of_job(_first(environment, *_MPI_JOBS)),
    )


def _slurm(environment: Mapping[str, str]) -> Membership | None:
    """A task of `srun` with others beside it.

    A batch script and the shell of salloc have SLURM_PROCID and SLURM_NTASKS, too, but are no task of a step. Nor is
    what somebody types into a terminal of `srun --pty`; what he starts there with another srun is.
    """
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return None
    if "SLURM_PTY_PORT" in environment and _in_terminal():
        return None
    num_ranks = number_in(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if num_ranks is None:
        raise missing("SLURM_NTASKS", beside="SLURM_PROCID")
    if num_ranks == 1:
        return None
    node = number_in(environment, "SLURM_NODEID")
    counts = tasks_per_node(_first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    hosts = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Membership(
        launcher="Slurm",
        rank=_needed(environment, "SLURM_PROCID", beside="SLURM_NTASKS"),
        num_ranks=num_ranks,
        local_rank=number_in(environment, "SLURM_LOCALID"),
        local_num_ranks=counts[node]
        if node is not None and node < len(counts)
        else number_in(environment, "SLURM_NTASKS_PER_NODE"),
        node=node,
        master=first_host(hosts) if hosts else None,
        port=_port_of_job(f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}"),
    )


def _kubernetes(environment: Mapping[str, str]) -> Membership | None:
    """A pod of an indexed job that is given WORLD_SIZE; one rank a pod. Without it the pods are runs of their own."""
    if "JOB_COMPLETION_INDEX" not in environment or "WORLD_SIZE" not in environment:
        return None
    return Membership(
        launcher="Kubernetes",
        rank=_needed(environment, "JOB_COMPLETION_INDEX", beside="WORLD_SIZE"),
        num_ranks=_needed(environment, "WORLD_SIZE", beside="JOB_COMPLETION_INDEX"),
        local_rank=0,
        local_num_ranks=1,
        node=number_in(environment, "JOB_COMPLETION_INDEX"),
    )


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Membership | None], ...] = (
    _variables,
    _open_mpi,
    _pmi,
    _slurm,
    _kubernetes,
)


def all_said(environment: Mapping[str, str]) -> list[Membership]:
    """What each launcher says that speaks, the one to believe first."""
    return [found for ask in _LAUNCHERS if (found := ask(environment)) is not None]


def missing(name: str, *, beside: str) -> TrainingError:
    """What to raise where a variable is missing that another one asks for."""
    meaning = {
        "MASTER_ADDR": "the host on which rank 0 runs",
        "RANK": "the number of this process, from 0",
        "WORLD_SIZE": "the number of all processes",
    }.get(name, "set by the launcher")
    return TrainingError(
        f"the environment says half of who this process is: {name} is missing",
        got=beside,
        next_step=f"set {name} ({meaning}), or start the run with torchrun or srun; docs/clusters.md has recipes",
    )


def _in_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def number_in(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set, as a number."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return None
    text = environment[name].strip()
    if not text.isdecimal():
        raise TrainingError(f"{name} is no number", got=repr(environment[name]), allowed="0, 1, 2, ...")
    return int(text)


def _needed(environment: Mapping[str, str], name: str, *, beside: str) -> int:
    number = number_in(environment, name)
    if number is None:
        raise missing(name, beside=f"{beside}={environment.get(beside, '')}")
    return number


def _port_of_job(job: str | None) -> int | None:
    """A port that all ranks of a job find by themselves and that jobs on one machine seldom share."""
    return None if job is None else _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
