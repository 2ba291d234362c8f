"""A connection that carries one JSON object a line and never waits; a forked process lets go of it."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_MOST_BYTES = 1 << 20


@dataclass
class Line:
    """A connection that carries one JSON object a line; never waits."""

    connection: socket.socket
    rank: int | None = None
    opened: float = field(default_factory=time.monotonic)
    read: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def send(self, message: Mapping[str, Any]) -> None:
        """What cannot go now goes with the next; signs that pile up are dropped."""
        if len(self.unsent) < _MOST_BYTES:
            self.unsent += json.dumps(message).encode() + b"\n"
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except OSError:
            pass  # full, or broken: reading tells

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have come, and whether the other side is gone."""
        gone = False
        try:
            while len(self.read) < _MOST_BYTES:
                block = self.connection.recv(1 << 16)
                if not block:
                    gone = True
                    break
                self.read += block
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        *lines, rest = bytes(self.read).split(b"\n")
        self.read = bytearray(rest)
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                return messages, True
            if isinstance(value, dict):
                messages.append(value)
        return messages, gone or len(self.read) >= _MOST_BYTES


class Connected(Protocol):
    """Whoever holds connections open."""

    def connections(self) -> list[socket.socket]:
        """Those it holds now."""


def close_in_children(owner: Connected) -> None:
    """A loader process forked later must not keep the connections of a rank that is gone."""
    reference = weakref.ref(owner)

    def close() -> None:
        kept = reference()
        for connection in kept.connections() if kept is not None else ():
            connection.close()

    os.register_at_fork(after_in_child=close)
