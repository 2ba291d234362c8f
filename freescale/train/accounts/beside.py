"""An accountant in this process, or in one of its own, to which everything is told by a pipe.

A rank that trains on a GPU has one beside it: what the accounts of 20 steps take, 20 to 40 ms of Python on all ranks at
the same step, would otherwise keep their devices waiting. One that is told to run elsewhere and cannot, as no process
can be started, runs here, and is asked at the same steps: ranks agree on these.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from freescale.errors import TrainingError
from freescale.trace import Arrival, Span, SpanWriter
from freescale.train.accounts.accountant import Accountant, ClosedStep, Due, KeptStepParts
from freescale.train.accounts.notes import Answers, Ask

Ended = Iterable[tuple[int, float, float]]

_ARRIVAL = Span._fields.index("arrival")


class Bookkeeper(Protocol):
    """Makes one account after the other: `start`, then `said` and `answer` in turn until it says which steps closed."""

    def begin(self) -> None:
        """Training goes on after a break in which nothing was recorded."""

    def start(self, spans: Sequence[Span], ended: Ended, due: Due) -> None:
        """An account is due; these have passed since the last one."""

    def said(self) -> Ask | list[ClosedStep]:
        """What the other ranks are to be asked now, or, at the end, the closed steps; may have to wait for it."""

    def answer(self, value: Any) -> None:
        """What they said."""

    def keep(self, kept: Sequence[KeptStepParts]) -> None:
        """What else is known of closed steps."""

    def close(self) -> None:
        """No account follows."""


class Here:
    """In this process: whatever it works out, its caller waits for."""

    def __init__(self, *, rank: int, alone: bool, spans: SpanWriter | None) -> None:
        self._accountant = Accountant(rank=rank, alone=alone, spans=spans)
        self.begin, self.keep = self._accountant.begin, self._accountant.keep
        self.close = self._accountant.close
        self._asks: Answers[list[ClosedStep]] | None = None
        self._answer: Any = None

    def start(self, spans: Sequence[Span], ended: Ended, due: Due) -> None:
        """An account is due."""
        self._accountant.hear(spans, ended)
        self._asks, self._answer = self._accountant.account(due), None

    def said(self) -> Ask | list[ClosedStep]:
        """Work on to the next question, or to the end."""
        assert self._asks is not None
        try:
            return self._asks.send(self._answer)
        except StopIteration as over:
            closed: list[ClosedStep] = over.value
            return closed

    def answer(self, value: Any) -> None:
        """What the other ranks said."""
        self._answer = value


class Beside:
    """In a process of its own, which ends with this one."""

    def __init__(self, *, rank: int, spans: SpanWriter | None, timeout_s: float = 600.0) -> None:
        here, there = socket.socketpair()
        root = str(Path(__file__).parents[3])
        places = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with here, there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": places},
            )
            self._pipe = Connection(here.detach())
        self._timeout_s = timeout_s
        self._tell({"rank": rank, "alone": False, "spans": spans})

    def begin(self) -> None:
        """Training goes on."""
        self._tell(("begin",))

    def start(self, spans: Sequence[Span], ended: Ended, due: Due) -> None:
        """An account is due."""
        self._tell(("hear", _packed(spans), list(ended)))
        self._tell(("account", due))

    def said(self) -> Ask | list[ClosedStep]:
        """What it has come to since it was told the last thing."""
        try:
            if not self._pipe.poll(self._timeout_s):
                raise TrainingError(
                    "the process that accounts for the time of this rank's steps does not answer",
                    got=f"nothing for {self._timeout_s:.0f} s",
                    next_step="trace.enabled=false trains without accounts",
                )
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if kind == "failed":
            raise TrainingError(f"accounting for the time of steps failed\n{value}")
        said: Ask | list[ClosedStep] = value
        return said

    def answer(self, value: Any) -> None:
        """What the other ranks said."""
        self._tell(value)

    def keep(self, kept: Sequence[KeptStepParts]) -> None:
        """What else is known of closed steps."""
        self._tell(("keep", kept))

    def close(self) -> None:
        """No account follows; what was told is written."""
        with suppress(OSError):
            self._pipe.send(None)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()

    def _tell(self, what: Any) -> None:
        try:
            self._pipe.send(what)
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> TrainingError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return TrainingError(
            "the process that accounts for the time of this rank's steps has ended",
            got=f"exit code {self._process.returncode}",
            next_step="the run resumes from its last checkpoint; trace.enabled=false trains without accounts",
        )


def _packed(spans: Sequence[Span]) -> bytes:
    """As they travel: column by column, which takes a fifth of the time that named tuples take one by one."""
    columns: list[Any] = list(zip(*spans))
    if columns:
        columns[_ARRIVAL] = [None if arrival is None else tuple(arrival) for arrival in columns[_ARRIVAL]]
    return marshal.dumps(columns)


def _unpacked(packed: bytes) -> list[Span]:
    columns = marshal.loads(packed)
    if columns:
        columns[_ARRIVAL] = [None if one is None else Arrival(*one) for one in columns[_ARRIVAL]]
    return [Span(*row) for row in zip(*columns)]


def serve(pipe: Connection) -> None:
    """Do what is told until the other end is closed."""
    accountant = Accountant(**pipe.recv())
    while (told := pipe.recv()) is not None:
        name, *values = told
        if name == "hear":
            packed, ended = values
            accountant.hear(_unpacked(packed), ended)
        elif name == "account":
            asks, answer = accountant.account(*values), None
            while True:
                try:
                    ask = asks.send(answer)
                except StopIteration as over:
                    pipe.send(("closed", over.value))
                    break
                pipe.send(("ask", ask))
                answer = pipe.recv()
        else:
            getattr(accountant, name)(*values)
    accountant.close()


def main() -> None:
    """The process; told to stop, a run still takes steps and accounts for them, so only its end is the end here."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except EOFError:
        pass  # the rank has ended
    except OSError:
        pass
    except Exception:
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
