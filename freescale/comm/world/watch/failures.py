"""What a process says of its failure: to its launcher, to the other ranks, to RUN_DIR/failures.jsonl, to its user.

Said first, and only then is anything torn down: a communicator that is closed too early may wait for ever.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from freescale.comm.world.watch.said import Said
from freescale.errors import EXIT_UNEXPECTED, FreeScaleError, PeerError, in_one_line
from freescale.trace import current_stage

LINE = "FREESCALE_LAUNCHER_LINE"
"""Number of the socket over which a rank tells its launcher that it lives, or why it failed."""
_TELL_S = 2.0
FAILURES_FILE = "failures.jsonl"
_BROKEN_CONNECTION = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "Timed out after",
    "Timed out waiting",
)
_run_folder: Path | None = None

Kind = Literal["known", "unexpected", "heard", "connection"]


@dataclass(frozen=True, kw_only=True)
class FailureNote(Said):
    """What one rank says of its failure.

    Args:
        message: what went wrong.
        kind: "known": it has a message for the user; "heard": so it has, but another rank met it; "unexpected": nobody
            foresaw it; "connection": another rank is probably the cause.
        time: when, in seconds since 1970.
        exit_code: how the process ends.
        met_by: who met it, where this rank has only heard of it.
    """

    message: str
    kind: Kind
    time: float
    exit_code: int = 1
    met_by: str | None = None

    def in_full(self, *, host: bool = True) -> str:
        """Who failed, where and why; machines need no names where there is one."""
        if self.met_by is not None:
            return f"{self.met_by} failed: {self.message}"
        return f"rank {self.rank}{f' on {self.host}' if host else ''} failed {self.where}: {self.message}"

    @property
    def explains(self) -> bool:
        """Whether it has a message for the user, whoever met it: nobody needs to look any further."""
        return self.kind in ("known", "heard")

    @classmethod
    def of(cls, error: BaseException) -> FailureNote:
        """Of an error on its way out of this process."""
        stage, step = current_stage()
        known = isinstance(error, FreeScaleError)
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            host=socket.gethostname(),
            stage=stage,
            step=step,
            message=str(error) if known else in_words(error),
            kind=_kind_of(error),
            time=time.time(),
            exit_code=exit_code_of(error),
            met_by=error.met_by if isinstance(error, FreeScaleError) else None,
        )


def in_words(error: BaseException) -> str:
    """Kind and whole text; of an error without a text (`assert`), where it was raised: the kind alone helps nobody."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else in_one_line(error)


def first_cause(notes: Iterable[FailureNote]) -> FailureNote | None:
    """The one that explains the others: a known error before any other, then one heard of, broken connections last."""
    order = ("known", "unexpected", "heard", "connection")
    return min(notes, key=lambda note: (order.index(note.kind), note.time), default=None)


def exit_code_of(error: BaseException) -> int:
    """How a process ends that this error leaves."""
    return error.exit_code if isinstance(error, FreeScaleError) else EXIT_UNEXPECTED


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that another rank could not be reached."""
    return any(
        isinstance(each, ConnectionError | TimeoutError)
        or (isinstance(each, RuntimeError) and any(text in str(each) for text in _BROKEN_CONNECTION))
        for each in _chain(error)
    )


def keep_failures_in(folder: Path | None) -> None:
    """From now on failures of this process are written there, too."""
    global _run_folder
    _run_folder = folder


def report_failure(error: BaseException) -> FailureNote:
    """Tell launcher, run folder and user of an error, once; before anything is torn down."""
    note = getattr(error, "_reported", None)
    if note is not None:
        return note
    note = FailureNote.of(error)
    error._reported = note  # type: ignore[attr-defined]
    _append(note, error)
    if not tell_launcher({"note": asdict(note)}, patience_s=_TELL_S):
        _print(note, error)
    return note


def was_reported(error: BaseException) -> bool:
    """Whether an error has been told already."""
    return hasattr(error, "_reported")


def mark_own(error: BaseException) -> None:
    """This rank is the cause of an error, though it may look as if a connection to another had broken."""
    error._own = True  # type: ignore[attr-defined]


def _kind_of(error: BaseException) -> Kind:
    broken = is_broken_connection(error) and not hasattr(error, "_own")
    if isinstance(error, PeerError) or broken:
        return "connection"
    if not isinstance(error, FreeScaleError):
        return "unexpected"
    return "known" if error.met_by is None else "heard"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def tell_launcher(message: Mapping[str, Any], *, patience_s: float = 0.0) -> bool:
    """One message to the launcher that started this rank; False when there is none, or it does not listen."""
    number = os.environ.get(LINE)
    if number is None:
        return False
    text, deadline = json.dumps(message).encode(), time.monotonic() + patience_s
    try:
        line = socket.socket(fileno=int(number))  # no copy of it: there may be no descriptor left
    except (OSError, ValueError):
        return False
    try:
        if (line.family, line.type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
            return False  # a process this rank has started inherits the number, not the line
        while True:
            try:
                line.send(text, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
    except OSError:
        return False
    finally:
        line.detach()


def _append(note: FailureNote, error: BaseException) -> None:
    """One line of RUN_DIR/failures.jsonl. A folder that cannot be written to is perhaps what failed."""
    if _run_folder is None:
        return
    line = {**asdict(note), "pid": os.getpid()}
    if not isinstance(error, FreeScaleError):
        line["traceback"] = "".join(traceback.format_exception(error))
    try:
        with open(_run_folder / FAILURES_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        pass


def end_process(code: int) -> NoReturn:
    """End now: threads may wait for a rank that is gone, and what closes communicators waits for it, too."""
    # What multiprocessing would remove at the end of an interpreter.
    if folder := multiprocessing.process.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """A line for the user beside the progress of the run."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _print(note: FailureNote, error: BaseException) -> None:
    from rich.console import Console
    from rich.markup import escape

    if isinstance(error, FreeScaleError):
        many = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(error, PeerError)
        told = note.in_full() if many else note.message
        Console(stderr=True).print(f"[red]error:[/] {escape(told)}", highlight=False, soft_wrap=True)
    else:
        traceback.print_exception(error)
    sys.stderr.flush()
