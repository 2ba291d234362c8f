"""Start the ranks of a run on this machine, and end all of them when one fails, with one message.

Each rank is this same command in a process of its own, told who it is by the variables torchrun sets too. Over a socket
it inherits it gives signs of life, and says why it failed (rank, step, stage, message). Nothing lies on a disk, which
may be full, nor where another user could find it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, NoReturn, cast

from freescale.comm.world.meeting import Nodes
from freescale.comm.world.watch import (
    BEAT_S,
    LINE,
    FailureNote,
    Liveness,
    SignOfLife,
    ask_for_stacks,
    end_process,
    first_cause,
    report_failure,
    say,
    silence,
)
from freescale.errors import EXIT_PEER, EXIT_PREEMPTED, FreeScaleError, PeerError, Preempted, TrainingError

RENDEZVOUS = "FREESCALE_RENDEZVOUS"
# Streams that wait for another rank must not share a hardware queue with those that compute; CUDA's own number is 8.
# Kernels of several communicators must start in the order of their calls on every GPU, or two GPUs wait for each other;
# NCCL sees to it when asked (2.26 and later; it reads this when it is first used).
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
CPU_THREADS = "FREESCALE_CPU_THREADS"
"""Set where OMP_NUM_THREADS is what the launcher has chosen, for ranks that compute on cores."""
_GRACE_S = 5.0
_LEAVE_S = 1.5
_SAVE_S = 600.0
"""How long ranks that were told to stop may take to save."""
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
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
    with ExitStack() as opened:
        store = None if nodes else opened.enter_context(_nameless_file())
        variables = {**_environment(num_ranks, store, nodes), **(environment or {})}
        processes: list[subprocess.Popen[bytes]] = []
        lines: list[socket.socket] = []
        try:
            for local in range(num_ranks):
                line, of_rank = (
                    opened.enter_context(end) for end in socket.socketpair(type=socket.SOCK_DGRAM)
                )
                lines.append(line)
                numbers = [each.fileno() for each in (of_rank, store) if each is not None]
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *program, *command],
                        env={
                            **variables,
                            "RANK": str(first + local),
                            "LOCAL_RANK": str(local),
                            LINE: str(of_rank.fileno()),
                        },
                        pass_fds=numbers,
                        preexec_fn=end_with_launcher if sys.platform == "linux" else None,
                    )
                )
            with _requests_passed_on(processes) as requests:
                trouble = _wait(dict(enumerate(processes, first)), dict(enumerate(lines, first)), requests)
            if trouble:
                raise trouble
        finally:
            _end(processes, lines)


def _nameless_file() -> BinaryIO:
    """Where ranks of one machine find each other: in memory, gone with those who have it open."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("freescale rendezvous"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def as_rank(work: Callable[[], None]) -> NoReturn:
    """Run the program of a rank and end its process; the launcher is told of a failure."""
    try:
        work()
    except BaseException as error:
        end_process(report_failure(error).exit_code)
    end_process(0)


def end_with_launcher() -> None:
    """In a new rank: the kernel kills it when the launcher dies, or it would train on beside the next run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(num_ranks: int, store: BinaryIO | None, nodes: Nodes | None) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    chosen = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads), CPU_THREADS: "1"}
    return {
        **chosen,
        **QUEUES,
        **os.environ,
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **(_several_machines(num_ranks, nodes) if nodes else {}),
        **(_one_machine(num_ranks, store) if store else {}),
    }


def _one_machine(num_ranks: int, store: BinaryIO) -> dict[str, str]:
    # A file nobody else has: ranks of one machine need no port, so none can be taken.
    return {"WORLD_SIZE": str(num_ranks), RENDEZVOUS: f"file:///dev/fd/{store.fileno()}"}


def _several_machines(num_ranks: int, nodes: Nodes) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_ranks * nodes.num_nodes),
        "NODE_RANK": str(nodes.node),
        "MASTER_ADDR": nodes.host,
        "MASTER_PORT": str(nodes.port),
    }


@contextmanager
def _requests_passed_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[float]]:
    """Inside, SIGTERM is for the ranks: they save and end, and a second one ends them at once; says when it came."""
    requests: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def pass_on(number: int, frame: object) -> None:
        requests.append(time.monotonic())
        for process in processes:
            process.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield requests
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(
    processes: Mapping[int, subprocess.Popen[bytes]],
    lines: Mapping[int, socket.socket],
    requests: Sequence[float],
) -> FreeScaleError | SystemExit | None:
    """Until all are done, or there is trouble and those who know more had a moment to say so; returns the trouble."""
    deadline, ranks = float("inf"), _Listener(lines)
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes.values()]
        ranks.listen()
        if None not in codes or any(note.kind == "known" for note in ranks.notes.values()):
            break
        if deadline == float("inf") and (any(codes) or ranks.notes):
            # One that has saved is followed by the others; one that waits in a library takes a little longer.
            deadline = time.monotonic() + (2 if EXIT_PREEMPTED in codes else 1) * _GRACE_S
        if requests and time.monotonic() > requests[0] + _SAVE_S:
            break
        if silent := ranks.judge():
            ask_for_stacks(processes[silent.rank].pid)
            return PeerError(silence(silent))
        time.sleep(0.05)
    failed = {rank: code for rank, process in processes.items() if (code := process.poll())}
    ranks.listen()
    told = {rank: code for rank, code in failed.items() if code in (EXIT_PREEMPTED, *_BY_SIGTERM)}
    # Where one has ended as told, another may have met its broken connection before it heard the same.
    broken = {rank for rank, note in ranks.notes.items() if note.kind == "connection"}
    if told and {*failed, *ranks.notes} <= {*told, *broken}:
        return _as_told(told, requests)
    failed = {rank: code for rank, code in failed.items() if code != EXIT_PREEMPTED}
    return _failure(failed, ranks.notes) if failed or ranks.notes else None


def _as_told(failed: Mapping[int, int], requests: Sequence[float]) -> FreeScaleError | SystemExit:
    """Ranks that were told to stop and did have not failed; rank 0, here or elsewhere, has said so if it heard."""
    if EXIT_PREEMPTED in failed.values() and failed.get(0, EXIT_PREEMPTED) == EXIT_PREEMPTED:
        return SystemExit(EXIT_PREEMPTED)
    if len(requests) == 1:
        return Preempted("stopped on request before the first step; the same command starts again")
    return SystemExit(128 + signal.SIGTERM) if requests else _failure(dict(failed), {})


class _Listener:
    """What ranks say over their lines: signs of life, and why they failed."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines = lines
        self._liveness = Liveness(len(lines))
        self._judged = 0.0
        self.notes: dict[int, FailureNote] = {}

    def listen(self) -> None:
        """Take what has come."""
        for rank, line in self._lines.items():
            for message in _messages(line):
                if sign := SignOfLife.made_of(message.get("sign", {})):
                    self._liveness.heard(sign)
                if note := FailureNote.made_of(message.get("note", {})):
                    self.notes[rank] = note
                if "bye" in message:
                    self._liveness.left(rank)

    def judge(self) -> SignOfLife | None:
        """Says for whom the others wait, and returns a rank that is silent for too long."""
        now = time.monotonic()
        if now - self._judged < 0.5 * BEAT_S:
            return None
        self._judged = now
        self._liveness.look(now=now)
        if late := self._liveness.late(now=now):
            say(late)
        return self._liveness.silent(now=now)


def _messages(line: socket.socket) -> Iterator[dict[str, Any]]:
    while True:
        try:
            message = json.loads(line.recv(1 << 20, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            return  # ended while it spoke
        if isinstance(message, dict):
            yield message


def _failure(failed: dict[int, int], stories: dict[int, FailureNote]) -> TrainingError:
    """The failure that came first: a killed rank or a known error explains the others' broken connections."""
    killed = [rank for rank, code in failed.items() if code < 0 and rank not in stories]
    cause = first_cause(stories.values())
    if killed and (cause is None or not cause.explains):
        where = f", while another rank was {cause.where}" if cause else ""
        name = signal.Signals(-failed[killed[0]]).name
        return PeerError(
            f"rank {killed[0]} was killed by {name}{where}",
            next_step="run the same command again: it resumes from the last checkpoint",
        )
    if cause is None:
        return PeerError(f"rank {min(failed)} ended with exit code {failed[min(failed)]} and no message")
    elsewhere = cause.exit_code == EXIT_PEER
    error = TrainingError(cause.message if elsewhere else cause.in_full(host=False))
    error.exit_code = cause.exit_code
    return error


def _end(processes: Sequence[subprocess.Popen[bytes]], lines: Sequence[socket.socket]) -> None:
    """End those that are left: a word, which a rank hears that waits for others, a signal, the last signal."""
    for process, line in zip(processes, lines, strict=False):
        if process.poll() is None:
            with contextlib.suppress(OSError):
                line.send(b"end", socket.MSG_DONTWAIT)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _LEAVE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
    for process in processes:
        process.wait()
