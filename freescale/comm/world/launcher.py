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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from freescale.comm.world.nodes import Nodes
from freescale.errors import FreeScaleError, TrainingError
from freescale.trace import current_stage

RENDEZVOUS = "FREESCALE_RENDEZVOUS"
# Streams that wait for another rank must not share a hardware queue with those that compute; CUDA's own number is 8.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
CPU_THREADS = "FREESCALE_CPU_THREADS"
"""Set where OMP_NUM_THREADS is what the launcher has chosen, for ranks that compute on cores."""
_NOTES = "FREESCALE_FAILURE_NOTES"
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
            _wait(processes)
            failed = {rank: p.returncode for rank, p in enumerate(processes, first) if p.returncode}
            if failed:
                raise _failure(failed, Path(notes))
        finally:
            _end(processes)


def note_failure(error: BaseException) -> bool:
    """Leave a note for the launcher that started this rank; False when nobody will read one."""
    folder = os.environ.get(_NOTES)
    if folder is None:
        return False
    stage, step = current_stage()
    known = isinstance(error, FreeScaleError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    note = {"stage": stage, "step": step, "message": message, "known": known, "time": time.time()}
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(note))
    return True


def as_rank(work: Callable[[], None]) -> NoReturn:
    """Run the program of a rank and end its process; the launcher is told of a failure."""
    try:
        work()
    except BaseException as error:
        if not note_failure(error):
            raise
        sys.stderr.flush()
        os._exit(1)  # threads may wait for a rank that is gone
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
        _NOTES: notes,
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


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all are done, or one has failed and the others had a moment to say why they did."""
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if deadline == float("inf") and any(codes):
            deadline = time.monotonic() + _GRACE_S
        time.sleep(0.05)


def _failure(failed: dict[int, int], notes: Path) -> TrainingError:
    """The failure that came first: a killed rank or a known error explains the others' broken connections."""
    stories = {rank: _read_note(notes / f"rank-{rank}.json") for rank in failed}
    killed = [rank for rank, story in stories.items() if story is None and failed[rank] < 0]
    if killed and not any(story and story["known"] for story in stories.values()):
        rank = killed[0]
        other = next((s for s in stories.values() if s), None)
        where = f", while another rank was in stage '{other['stage']}'{_at(other)}" if other else ""
        name = signal.Signals(-failed[rank]).name
        return TrainingError(
            f"rank {rank} was killed by {name}{where}",
            next_step="run the same command again: it resumes from the last checkpoint",
        )
    noted = {rank: story for rank, story in stories.items() if story}
    if not noted:
        return TrainingError(f"rank {min(failed)} ended with exit code {failed[min(failed)]} and no message")
    rank = min(noted, key=lambda r: (not noted[r]["known"], noted[r]["time"]))
    story = noted[rank]
    return TrainingError(f"rank {rank} failed in stage '{story['stage']}'{_at(story)}: {story['message']}")


def _read_note(path: Path) -> dict[str, Any] | None:
    """What a rank said about its failure; None if it could not, or only half."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _at(story: dict[str, Any]) -> str:
    return "" if story["step"] is None else f" at step {story['step']}"


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
