"""Unix sockets that only processes of the same user can call, so that nobody else joins a run or holds it up.

A name in the abstract namespace stands in /proc/net/unix, and every user of the machine may connect to it. Here a
socket has no name: its file is gone as soon as it is bound, and others open it by way of /proc/PID/fd, which the kernel
allows to processes of the same user only. Whoever calls also says a secret and its rank, within a short time; the
kernel says whose process it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from collections.abc import Collection

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
# A caller says who it is at once; one that does not is forgotten, and nobody has waited for it.
_HELLO_S = 5.0


class PrivateListener:
    """Takes the calls of other ranks of this machine.

    Args:
        num_callers: calls that may come in at once.

    `name` is what a rank needs to call; told to the ranks of the run and to nobody else.
    """

    def __init__(self, num_callers: int) -> None:
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener, self._file = _nameless(num_callers)
        self.name = f"/proc/{os.getpid()}/fd/{self._file} {self._secret.hex()}"

    def __enter__(self) -> PrivateListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more calls."""
        self._listener.close()
        os.close(self._file)

    def accept(self, ranks: Collection[int], *, timeout_s: float) -> dict[int, socket.socket]:
        """A connection from each of these ranks; anybody else is turned away, and a silent caller holds nobody up."""
        found: dict[int, socket.socket] = {}
        greeting: dict[int, _Caller] = {}
        deadline = time.monotonic() + timeout_s
        while missing := sorted(set(ranks) - set(found)):
            poll = select.poll()
            for file in (self._listener.fileno(), *greeting):
                poll.register(file, select.POLLIN)
            left = min([deadline, *(each.deadline for each in greeting.values())]) - time.monotonic()
            for file, _ in poll.poll(1000 * max(0.0, left)):
                if file == self._listener.fileno():
                    self._let_in(greeting)
                elif greeting[file].has_spoken():
                    caller = greeting.pop(file)
                    rank = caller.rank(self._secret)
                    if rank in missing and rank not in found:
                        found[rank] = caller.connection
                    else:
                        caller.connection.close()
            _forget_silent(greeting)
            if time.monotonic() > deadline:
                _close([*found.values(), *(each.connection for each in greeting.values())])
                raise TimeoutError(f"ranks {missing} did not connect within {timeout_s:.0f} s")
        _close([each.connection for each in greeting.values()])
        return found

    def _let_in(self, greeting: dict[int, _Caller]) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        if user_of(connection) == os.geteuid():
            greeting[connection.fileno()] = _Caller(connection)
        else:
            connection.close()


class _Caller:
    """A connection that has yet to say who it is."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _HELLO_S
        self._said = b""

    def has_spoken(self) -> bool:
        """Take what has come; whether it is all that will."""
        try:
            part = self.connection.recv(_HELLO.size - len(self._said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._said += part
        return not part or len(self._said) == _HELLO.size

    def rank(self, secret: bytes) -> int | None:
        """Who it says it is; None if it does not know the secret."""
        if len(self._said) != _HELLO.size:
            return None
        said, rank = _HELLO.unpack(self._said)
        return int(rank) if secrets.compare_digest(said, secret) else None


def call(name: str, *, rank: int, timeout_s: float) -> socket.socket:
    """Connect to a rank that listens, as this rank."""
    address, secret = name.split()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        if user_of(connection) != os.geteuid():
            raise PermissionError("another user listens where a rank of this run should")
        connection.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    except BaseException:
        connection.close()
        raise
    return connection


def user_of(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def _nameless(num_callers: int) -> tuple[socket.socket, int]:
    """A listening socket and an open file by which it can be called; in a folder of our own until it has none."""
    listener = socket.socket(socket.AF_UNIX)
    folder = tempfile.mkdtemp(prefix="freescale-")
    try:
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            # By number: a socket's path has at most 107 bytes, a folder for temporary files may have more.
            listener.bind(f"/proc/self/fd/{place}/socket")
            listener.listen(num_callers)
            listener.setblocking(False)
            return listener, os.open("socket", os.O_PATH, dir_fd=place)
        finally:
            os.close(place)
    except BaseException:
        listener.close()
        raise
    finally:
        # Without a file of its own, which a process that has too many open could not have.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/socket")
        os.rmdir(folder)


def _forget_silent(greeting: dict[int, _Caller]) -> None:
    now = time.monotonic()
    for file in [file for file, caller in greeting.items() if caller.deadline < now]:
        greeting.pop(file).connection.close()


def _close(connections: Collection[socket.socket]) -> None:
    for connection in connections:
        connection.close()
