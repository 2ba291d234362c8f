"""Start the ranks of a run on this machine, and end all of them when one fails, with one message.

Each rank is this same command in a process of its own, told who it is by the variables torchrun sets too. A rank
that fails leaves a note (rank, step, stage, message) in a folder the launcher reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from freescale.comm.world.failures import NOTES, FailureNote, first_cause, report_failure, say
from freescale.comm.world.liveness import BEAT_S, Liveness, SignOfLife, silence
from freescale.comm.world.nodes import Nodes
from freescale.errors import EXIT_PEER, PeerError, TrainingError

RENDEZVOUS = "FREESCALE_RENDEZVOUS"
# Streams that wait for another rank must not share a hardware queue with those that compute; CUDA's own number is 8.
# Kernels of several communicators must start in the order of their calls on every GPU, or two GPUs wait for each other;
# NCCL sees to it when asked (2.26 and later; it reads this when it is first used).
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
CPU_THREADS = "FREESCALE_CPU_THREADS"
"""Set where OMP_NUM_THREADS is what the launcher has chosen, for ranks that compute on cores."""
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "freescale"),
    nodes: Nodes | None = None,
) -> None:
    """Run a command of freescale on this many ranks; raises TrainingError for the first failure.

    Args:
        command: what follows the program.
        num_ranks: processes on this machine, and as many on every other.
        environment: further variables for all of them.
        program: what Python runs; a file of one's own that takes part with `join_ranks` does as well.
        nodes: the machines of the run, if there are several; each starts its own part.
    """
    first = nodes.node * num_ranks if nodes else 0
    with tempfile.TemporaryDirectory(prefix="freescale-") as notes:
        variables = {**_environment(num_ranks, notes, nodes), **(environment or {})}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for local in range(num_ranks):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *program, *command],
                        env={**variables, "RANK": str(first + local), "LOCAL_RANK": str(local)},
                        preexec_fn=_end_with_launcher if sys.platform == "linux" else None,
                    )
                )
            if trouble := _wait(dict(enumerate(processes, first)), Path(notes)):
                raise trouble
        finally:
            _end(processes)


def as_rank(work: Callable[[], None]) -> NoReturn:
    """Run the program of a rank and end its process; the launcher is told of a failure."""
    try:
        work()
    except BaseException as error:
        note = report_failure(error)
        sys.stderr.flush()
        os._exit(note.exit_code)  # threads may wait for a rank that is gone
    sys.stdout.flush()
    os._exit(0)


def _end_with_launcher() -> None:
    """In a new rank: the kernel kills it when the launcher dies, or it would train on beside the next run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(num_ranks: int, notes: str, nodes: Nodes | None) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    chosen = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads), CPU_THREADS: "1"}
    return {
        **chosen,
        **QUEUES,
        **os.environ,
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **(_several_machines(num_ranks, nodes) if nodes else _one_machine(num_ranks, notes)),
        NOTES: notes,
    }


def _one_machine(num_ranks: int, notes: str) -> dict[str, str]:
    # A file nobody else knows: ranks of one machine need no port, so none can be taken.
    return {"WORLD_SIZE": str(num_ranks), RENDEZVOUS: f"file://{notes}/rendezvous"}


def _several_machines(num_ranks: int, nodes: Nodes) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_ranks * nodes.num_nodes),
        "NODE_RANK": str(nodes.node),
        "MASTER_ADDR": nodes.host,
        "MASTER_PORT": str(nodes.port),
    }


def _wait(processes: Mapping[int, subprocess.Popen[bytes]], notes: Path) -> TrainingError | None:
    """Until all are done, or there is trouble and those who know more had a moment to say so; returns the trouble."""
    deadline, signs = float("inf"), _Signs(notes, list(processes))
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes.values()]
        told = _read_notes(notes, processes)
        if None not in codes or any(note.kind == "known" for note in told.values()):
            break
        if deadline == float("inf") and (any(codes) or told):
            deadline = time.monotonic() + _GRACE_S
        if silent := signs.look():
            return PeerError(silence(silent))
        time.sleep(0.05)
    failed = {rank: code for rank, process in processes.items() if (code := process.poll())}
    told = _read_notes(notes, processes)
    return _failure(failed, told) if failed or told else None


def _read_notes(folder: Path, ranks: Iterable[int]) -> dict[int, FailureNote]:
    """What ranks have said of their failures."""
    return {rank: note for rank in ranks if (note := FailureNote.read(folder / f"rank-{rank}.json"))}


class _Signs:
    """The signs of life in a folder; asked often, it looks twice a second."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._folder, self._ranks = folder, ranks
        self._liveness = Liveness(len(ranks))
        self._seen: dict[int, int] = {}
        self._looked = 0.0

    def look(self) -> SignOfLife | None:
        """Says for whom the others wait, and returns a rank that is silent for too long."""
        now = time.monotonic()
        if now - self._looked < 0.5 * BEAT_S:
            return None
        self._looked = now
        for rank in self._ranks:
            self._read(rank)
        self._liveness.look(now=now)
        if late := self._liveness.late(now=now):
            say(late)
        return self._liveness.silent(now=now)

    def _read(self, rank: int) -> None:
        path = self._folder / f"alive-{rank}.json"
        try:
            written = path.stat().st_mtime_ns
            if self._seen.get(rank) == written:
                return
            sign = SignOfLife.made_of(json.loads(path.read_text()))
        except OSError:
            self._liveness.left(rank)  # it has said good-bye, or not come yet
            return
        self._seen[rank] = written
        if sign is not None:
            self._liveness.heard(sign)


def _failure(failed: dict[int, int], stories: dict[int, FailureNote]) -> TrainingError:
    """The failure that came first: a killed rank or a known error explains the others' broken connections."""
    killed = [rank for rank, code in failed.items() if code < 0 and rank not in stories]
    cause = first_cause(stories.values())
    if killed and (cause is None or cause.kind != "known"):
        where = f", while another rank was {cause.where}" if cause else ""
        name = signal.Signals(-failed[killed[0]]).name
        return PeerError(
            f"rank {killed[0]} was killed by {name}{where}",
            next_step="run the same command again: it resumes from the last checkpoint",
        )
    if cause is None:
        return PeerError(f"rank {min(failed)} ended with exit code {failed[min(failed)]} and no message")
    elsewhere = cause.exit_code == EXIT_PEER
    error = TrainingError(
        cause.message if elsewhere else f"rank {cause.rank} failed {cause.where}: {cause.message}"
    )
    error.exit_code = cause.exit_code
    return error


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
