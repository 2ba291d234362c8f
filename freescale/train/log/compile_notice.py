"""Steps that take long because kernels are compiled say so: half a minute without a word looks like a hang."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_COMPILERS = ("triton/compiler/", "triton/backends/")
_LOOK_S = 4.0


@contextmanager
def telling_of_compilation(tell: Callable[[str], None], *, look_s: float = _LOOK_S) -> Iterator[None]:
    """While this thread compiles kernels for longer than a moment, tell once.

    Args:
        tell: called by another thread.
        look_s: seconds from one look at this thread to the next.
    """
    done, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        while not done.wait(look_s):
            if _compiles(sys._current_frames().get(thread)):
                tell(
                    f"compiling kernels for this GPU, up to a minute, once: later runs find them in {_cache()}"
                )
                return

    watcher = threading.Thread(target=look, name="compile notice", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _compiles(frame: FrameType | None) -> bool:
    """Whether one of the calls a thread is in belongs to Triton's compiler."""
    while frame is not None:
        if any(each in frame.f_code.co_filename for each in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def _cache() -> str:
    return os.environ.get("TRITON_CACHE_DIR") or str(Path("~", ".triton", "cache"))
