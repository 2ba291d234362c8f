"""Do something as another user of the machine, in a network of one's own, where nobody else can be harmed."""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 (sockets want it, and another user may be unable to read Python's files)
import fcntl
import os
import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Any

import pytest

OTHER = 65534
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other_user(act: Callable[[], Any]) -> Any:
    """The result of a function in a process of another user."""
    return wait_for(start_as_other_user(act))


def start_as_other_user(act: Callable[[], Any]) -> tuple[int, int]:
    """Begin, in a process of another user; what to wait for."""

    def become_other() -> None:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        os.chdir("/")

    return _start(become_other, act)


def in_own_network(act: Callable[[], Any]) -> Any:
    """The result of a function in a process that has ports and unix sockets to itself, and so have its children."""

    def leave_network() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))

    try:
        return wait_for(_start(leave_network, act))
    except AssertionError as error:
        if "unshare" in str(error):
            pytest.skip("a network of one's own is not permitted here")
        raise


def _start(prepare: Callable[[], None], act: Callable[[], Any]) -> tuple[int, int]:
    receive, send = os.pipe()
    child = os.fork()
    if child:
        os.close(send)
        return child, receive
    try:
        os.close(receive)
        prepare()
        answer = True, act()
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(send, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def wait_for(started: tuple[int, int]) -> Any:
    """What a process that was started has to say, or AssertionError with its traceback."""
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
