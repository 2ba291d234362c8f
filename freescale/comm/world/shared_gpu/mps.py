"""An MPS daemon of our own: CUDA's service that lets kernels of several processes run on one GPU at the same time.

It lives in a private folder (mode 0700, a name nobody can guess), knows only the ranks it was started for, and ends
with them: at the end, after a failure, on Ctrl-C and on SIGTERM. Only SIGKILL leaves one behind; the next start finds
it, because nobody holds the lock of its folder any more, and clears it away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale.errors import TrainingError

PROGRAM = "nvidia-cuda-mps-control"
PREFIX = "freescale-mps-"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_SERVER = "nvidia-cuda-mps-server"
_PATIENCE_S = 10.0
_YOUNG_S = 60.0
"""A folder younger than this may belong to a launcher that has not taken its lock yet."""


class MpsError(TrainingError):
    """MPS cannot be used on this machine; the message says why."""


def is_mps_client() -> bool:
    """Whether this process was told to share its GPU through a daemon."""
    return bool(os.environ.get(_PIPES))


@contextmanager
def mps_daemon(*, visible: str) -> Iterator[dict[str, str]]:
    """A running daemon; yields the environment that makes a process its client.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the daemon, one GPU.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise MpsError(f"{PROGRAM} is not installed")
    clear_leftovers(program)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with open(folder / "owner", "w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            clients = _client_environment(folder)
            _start(program, {**os.environ, **clients, "CUDA_VISIBLE_DEVICES": visible})
            yield clients
        finally:
            with _undisturbed():
                _end(program, folder)


def clear_leftovers(program: str, *, within: Path | None = None) -> list[Path]:
    """End the daemons, and remove the folders, of launchers that were killed; returns the folders."""
    cleared = []
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        try:
            facts = folder.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _YOUNG_S:
                continue
            with open(folder / "owner", "a") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end(program, folder)
                cleared.append(folder)
        except OSError:
            continue  # somebody lives there, or has just cleared it, too
    return cleared


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP leave the program like Ctrl-C does, through everything that clears up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave a daemon behind; what happens inside takes seconds at most."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _client_environment(folder: Path) -> dict[str, str]:
    pipes, logs = folder / "pipe", folder / "log"
    pipes.mkdir(mode=0o700)
    logs.mkdir(mode=0o700)
    return {_PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}


def _start(program: str, environment: dict[str, str]) -> None:
    """Start the daemon and hear from it, or say why not."""
    # A share meant for clients would bound the daemon itself.
    environment = {k: v for k, v in environment.items() if k != "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}
    started = _run([program, "-d"], "", environment)
    if started.returncode:
        said = started.stdout.strip() or f"exit code {started.returncode}"
        raise MpsError(f"{PROGRAM} could not start: {said}")
    answer = _run([program], "get_default_active_thread_percentage\n", environment)
    if answer.returncode or not answer.stdout.strip():
        said = answer.stdout.strip() or "no answer"
        raise MpsError(f"the MPS daemon does not answer: {said}")


def _end(program: str, folder: Path) -> None:
    """Ask the daemon to quit, wait, kill what is left, and remove the folder."""
    environment = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    if _processes_of(folder):
        _run([program], "quit\n", environment)
        deadline = time.monotonic() + _PATIENCE_S
        while _processes_of(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in _processes_of(folder):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
    shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One call of the control program, away from the terminal's Ctrl-C.

    Its words go to a file: a daemon may keep its end of a pipe open, and a reader would wait for it for ever.
    """
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                command,
                input=text,
                env=environment,
                stdout=said,
                stderr=said,
                text=True,
                timeout=_PATIENCE_S,
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, str(error))
        said.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, said.read())


def _processes_of(folder: Path) -> list[int]:
    """Daemons and servers of this folder: they carry its name in their environment, or stand in its pid file."""
    mark = f"CUDA_MPS_PIPE_DIRECTORY={folder / 'pipe'}".encode()
    noted = _noted_process(folder)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if PROGRAM.encode() not in words and _SERVER.encode() not in words:
                continue
            if (process / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            if process.name == noted or mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue  # gone, or another user's
    return found


def _noted_process(folder: Path) -> str:
    try:
        return (folder / "pipe" / f"{PROGRAM}.pid").read_text().strip()
    except OSError:
        return ""
