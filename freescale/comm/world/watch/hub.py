"""Rank 0's end of the watch: one connection a rank, one judgement for all."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from freescale.comm.world.watch.failures import FailureNote, first_cause, say
from freescale.comm.world.watch.line import Line, close_in_children
from freescale.comm.world.watch.liveness import BEAT_S, RESUMES, Liveness, SignOfLife, silence

GRACE_S = 1.0
"""So long after the first sign of trouble a better explanation may come."""
HELLO_S = 5.0
"""So long a caller may take to say who it is."""
_MAX_STRANGERS = 64


class Hub:
    """Rank 0's end: hears of everybody, decides what the trouble is, tells everybody.

    Args:
        num_ranks: how many there are.
        listener: where ranks call.
        token: what they must know.
    """

    def __init__(self, num_ranks: int, listener: socket.socket, *, token: str) -> None:
        self._listener, self._token = listener, token
        self._lines: dict[socket.socket, Line] = {}
        self._liveness = Liveness(num_ranks)
        self._notes: list[FailureNote] = []
        self._gone: list[str] = []
        self._trouble: float | None = None
        self._told: str | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch over ranks", daemon=True)
        self._thread.start()
        close_in_children(self)

    def connections(self) -> list[socket.socket]:
        """What this process holds open."""
        return [self._listener, *self._lines]

    def add(self, connection: socket.socket) -> None:
        """A caller; who it is, it must say."""
        connection.setblocking(False)
        self._lines[connection] = Line(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def close(self) -> None:
        """All is well: let everybody go."""
        self._done.set()
        self._thread.join(2 * BEAT_S)
        for line in list(self._lines.values()):
            line.send({"end": True})
            line.connection.close()
        self._listener.close()

    def _run(self) -> None:
        beat = 0.0
        while not self._done.is_set():
            for key, _ in self._selector.select(0.2 * BEAT_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(self._lines[key.fileobj])  # type: ignore[index]
            now = time.monotonic()
            self._liveness.look(now=now)
            self._judge(now)
            if now - beat >= BEAT_S:
                beat = now
                self._tick(now)

    def _tick(self, now: float) -> None:
        for line in list(self._lines.values()):
            if line.rank is not None:
                line.send({"alive": True})
            elif now - line.opened > HELLO_S:
                self._drop(line)
        late = self._liveness.late(now=now)
        if late and self._trouble is None:
            say(late)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        strangers = [line for line in self._lines.values() if line.rank is None]
        if len(strangers) >= _MAX_STRANGERS:
            self._drop(strangers[0])
        self.add(connection)

    def _hear(self, line: Line) -> None:
        messages, gone = line.receive()
        for message in messages:
            if line.rank is None:
                if not secrets.compare_digest(str(message.get("token", "")), self._token):
                    self._drop(line)
                    return
                line.rank = int(message["rank"])
                line.send({"alive": True})
            if sign := SignOfLife.made_of(message.get("sign", {})):
                self._liveness.heard(sign)
            if note := FailureNote.made_of(message.get("note", {})):
                self._notes.append(note)
            if "bye" in message:
                self._liveness.left(line.rank)
                self._drop(line)
                return
        if gone:
            rank = line.rank
            self._drop(line)
            if rank is not None and not any(note.rank == rank for note in self._notes):
                sign = self._liveness.sign_of(rank)
                self._gone.append(without_a_word(rank, f" on {sign.host}, {sign.where}," if sign else ""))
            if rank is not None:
                self._liveness.left(rank)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.connection)
        del self._lines[line.connection]
        line.connection.close()

    def _judge(self, now: float) -> None:
        """Tell everybody once there is trouble and it has had a moment to explain itself."""
        silent = self._liveness.silent(now=now)
        if not (self._notes or self._gone or silent):
            return
        self._trouble = self._trouble or now
        cause = first_cause(self._notes)
        known = cause is not None and cause.kind == "known"
        if self._told is None and (known or silent or now - self._trouble >= GRACE_S):
            self._told = explain(self._notes, self._gone, silent)
            for line in sorted(
                self._lines.values(), key=lambda line: line.rank == 0
            ):  # who may end behind it
                line.send({"verdict": self._told})


def explain(notes: Sequence[FailureNote], gone: Sequence[str], silent: SignOfLife | None) -> str:
    """What happened, in words: a known error, else who is gone, else an unexpected error, else who is silent."""
    cause = first_cause(notes)
    if cause is not None and cause.explains:
        return cause.in_full()
    if gone:
        return gone[0]
    if cause is not None and cause.kind == "unexpected":
        return cause.in_full()
    if silent is not None:
        return silence(silent)
    assert cause is not None
    return f"rank {cause.rank} on {cause.host} lost the others {cause.where}: {cause.message}"


def without_a_word(rank: int, where: str) -> str:
    """A rank whose connection has closed, and nothing was said before."""
    why = "killed, out of memory, or its machine is down"
    return f"rank {rank}{where} ended without a word: {why}\n  next:    {RESUMES}"
