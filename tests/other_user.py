"""Do something as another user of the machine."""

from __future__ import annotations

import encodings.idna  # noqa: F401 (sockets want it, and another user may be unable to read Python's files)
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

OTHER = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other_user(act: Callable[[], Any]) -> Any:
    """The result of a function in a process of another user."""
    return wait_for_other_user(start_as_other_user(act))


def start_as_other_user(act: Callable[[], Any]) -> tuple[int, int]:
    """Begin, in a process of another user; what to wait for."""
    receive, send = os.pipe()
    child = os.fork()
    if child:
        os.close(send)
        return child, receive
    try:
        os.close(receive)
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        os.chdir("/")
        answer = True, act()
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(send, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def wait_for_other_user(started: tuple[int, int]) -> Any:
    """Its result, or AssertionError with its traceback."""
    child, receive = started
    with os.fdopen(receive, "rb") as pipe:
        ok, result = pickle.load(pipe)
    os.waitpid(child, 0)
    assert ok, result
    return result


def unix_names() -> list[str]:
    """Unix sockets of this project that anybody may call: those with a name in the abstract namespace."""
    with open("/proc/net/unix") as table:
        return ["\0" + line.split("@", 1)[1].strip() for line in table if "@freescale" in line]
