"""Steps that take long because something is compiled say so: half a minute without a word looks like a hang."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_LOOK_S = 4.0


class _Compiler(NamedTuple):
    """Where its code lies, what it compiles for, and where it keeps that."""

    folders: tuple[str, ...]
    target: str
    kept_in: Callable[[], str]


def _of_triton() -> str:
    return os.environ.get("TRITON_CACHE_DIR") or str(Path("~", ".triton", "cache"))


def _of_numba() -> str:
    return os.environ.get("NUMBA_CACHE_DIR") or "__pycache__ beside the code"


_COMPILERS = (
    _Compiler(("triton/compiler/", "triton/backends/"), "kernels for this GPU", _of_triton),
    _Compiler(("numba/core/",), "loops for this CPU", _of_numba),
)


@contextmanager
def telling_of_compilation(tell: Callable[[str], None], *, look_s: float = _LOOK_S) -> Iterator[None]:
    """While this process compiles for longer than a moment, tell once.

    Args:
        tell: called by another thread.
        look_s: seconds from one look at its threads to the next.
    """
    done = threading.Event()

    def look() -> None:
        while not done.wait(look_s):
            if (at_work := _at_work()) is not None:
                tell(
                    f"compiling {at_work.target}, up to a minute, once: later runs find them in {at_work.kept_in()}"
                )
                return

    watcher = threading.Thread(target=look, name="compile notice", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _at_work() -> _Compiler | None:
    """The compiler that some thread is inside of."""
    own = threading.get_ident()
    # Without this function's own frame: in its own list it would keep itself, and with it all tensors that the step was
    # computing when it was looked at, until Python looks for such circles.
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
    return next((each for each in _COMPILERS if any(_is_in(frame, each) for frame in frames)), None)


def _is_in(frame: FrameType | None, compiler: _Compiler) -> bool:
    while frame is not None:
        if any(folder in frame.f_code.co_filename for folder in compiler.folders):
            return True
        frame = frame.f_back
    return False
