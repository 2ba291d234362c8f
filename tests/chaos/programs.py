"""Programs of a trial: the real command in real processes, forked where torch is imported already, or from cold.

What a program forked here starts by `sys.executable` is forked from it, too, as its own child: signals, exit codes and
parents are those of the true command; only its imports are not shown. Before its main each forked process runs the
trial's hook, by which a fault gets inside: it knows its rank from the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import freescale
import tests.ranks  # noqa: F401  what every training imports of torch
from tests.chaos.sandbox import die_with_parent
from tests.warm_python import become, run_as_python

REPOSITORY = Path(__file__).parents[2]
Hook = Callable[[], None]


def preload() -> None:
    """Import all of freescale once, instead of in every process forked later, and set it aside for the collector."""
    for module in pkgutil.walk_packages(freescale.__path__, "freescale."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # what needs a package or a device that is not here
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


class Program:
    """One command that was started.

    Args:
        name: what its logs are called.
        arguments: what follows `python`.
        folder: where it runs.
        logs: where its output goes.
        environment: all variables it has.
        hook: runs in each of its processes before their main; not from cold.
        cold: start Python anew, as a user does.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        logs: Path,
        environment: Mapping[str, str],
        hook: Hook,
        cold: bool = False,
    ) -> None:
        self.name = name
        self.out, self.err = logs / f"{name}.out", logs / f"{name}.err"
        self.code: int | None = None
        self.ended = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                die_with_parent()
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                streams = [os.open(path, flags) for path in (self.out, self.err)]
                streams.insert(0, os.open(os.devnull, os.O_RDONLY))
                become(streams, str(folder), dict(environment))
                if cold:
                    os.execv(sys.executable, [sys.executable, *arguments])
                _run_warm(list(arguments), hook)
            finally:
                os._exit(125)

    def poll(self) -> int | None:
        """Its exit code, -N for a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        return self.code

    def wait(self, seconds: float) -> int | None:
        """The same after at most this long."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.code

    @property
    def said(self) -> str:
        """What it wrote to standard error."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""


def _run_warm(arguments: list[str], hook: Hook) -> NoReturn:
    """In a fork: be `python ARGUMENTS`, and let what it starts be forked from here."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python starts
        signal.signal(number, signal.SIG_IGN)
    atexit._clear()
    tempfile.tempdir = None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    class Forked(_ForkedPopen):
        before_main = staticmethod(hook)

    subprocess.Popen = Forked  # type: ignore[misc]
    hook()
    run_as_python(arguments)


class _ForkedPopen(subprocess.Popen[Any]):
    """subprocess.Popen, but `sys.executable ...` is a fork of this process."""

    before_main: Hook

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if isinstance(args, str) or list(args[:1]) != [sys.executable]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        preexec, keep, cwd, env = rest[1], rest[3], rest[4], rest[5]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        new_session = rest[20]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if new_session:
                    os.setsid()
                if preexec is not None:
                    preexec()
                taken = [p2cread, c2pwrite, errwrite]
                streams = [os.dup(number if fd == -1 else fd) for number, fd in enumerate(taken)]
                _close_all_but({0, 1, 2, *streams, *keep})
                become(streams, cwd or os.getcwd(), dict(os.environ if env is None else env))
                _run_warm([os.fspath(word) for word in args[1:]], self.before_main)
            finally:
                os._exit(125)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue
