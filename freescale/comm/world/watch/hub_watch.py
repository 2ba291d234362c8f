"""A rank's end of the watch: its signs go to rank 0, the judgement comes back."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from freescale.comm.world.watch.failures import FailureNote, end_process, report_failure, was_reported
from freescale.comm.world.watch.hub import GRACE_S, Hub, without_a_word
from freescale.comm.world.watch.line import Line, close_in_children
from freescale.comm.world.watch.liveness import BEAT_S, RESUMES, Pulse
from freescale.comm.world.watch.watches import Watch
from freescale.errors import PeerError

_LEAVE_S = 5.0
"""So long the main thread may take to end by itself, once the run has failed elsewhere."""


class HubWatch(Watch):
    """Of a rank that may have others on other machines: one connection to rank 0.

    Args:
        connection: to the hub.
        pulse: of this rank.
        token: what the hub wants to hear.
        silent_s: how long the hub may be silent.
        hub: where this process serves it: rank 0 does.
        hub_host: machine of rank 0.
    """

    def __init__(
        self,
        connection: socket.socket,
        pulse: Pulse,
        *,
        token: str,
        silent_s: float,
        hub: Hub | None = None,
        hub_host: str,
    ) -> None:
        self._pulse, self._silent_s, self._hub, self._hub_host = pulse, silent_s, hub, hub_host
        connection.setblocking(False)
        self._line = Line(connection)
        self._lock = threading.Lock()
        self._verdict: str | None = None
        self._heard = threading.Event()
        self._leaving = threading.Event()
        self._exit_code: int | None = None
        self._send({"token": token, "rank": pulse.take().rank})
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()
        close_in_children(self)

    def connections(self) -> list[socket.socket]:
        """What this process holds open."""
        return [self._line.connection]

    def failed(self, error: BaseException) -> BaseException:
        """Tell of an error; one that another rank caused is replaced by what is known of that rank."""
        if was_reported(error):
            return error
        note = FailureNote.of(error)
        self._exit_code = note.exit_code
        self._send({"note": asdict(note)})
        if note.kind == "connection" and self._heard.wait(self._silent_s + 2 * GRACE_S):
            error = self._peer_error()
        report_failure(error)
        if self._hub is not None:  # it ends with this process, and the others would hear of nothing but that
            self._heard.wait(2 * GRACE_S)
        self._leaving.set()
        return error

    def leave(self) -> None:
        """Say good-bye; rank 0 goes last."""
        self._leaving.set()
        if self._hub is not None:
            self._hub.close()
        else:
            self._send({"bye": True})
        self._thread.join(2 * BEAT_S)
        self._line.connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._line.send(message)

    def _run(self) -> None:
        last, looked = time.monotonic(), time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._line.connection, selectors.EVENT_READ)
        while not self._leaving.is_set() and self._verdict is None:
            self._send({"sign": asdict(self._pulse.take())})
            selector.select(BEAT_S)
            now = time.monotonic()
            messages, gone = self._line.receive()
            if messages or now - looked > 5 * BEAT_S:  # heard, or asleep itself
                last = now
            looked = now
            if any("end" in message for message in messages):
                return
            self._verdict = next((str(m["verdict"]) for m in messages if "verdict" in m), None)
            if self._verdict is None and gone:
                self._verdict = without_a_word(0, f" on {self._hub_host}")
            if self._verdict is None and now - last > self._silent_s:
                self._verdict = (
                    f"rank 0 on {self._hub_host} has not been heard for {self._silent_s:g} s: its process is stopped,"
                    f" or a machine is down or cut off\n  next:    {RESUMES}; comm.silent_s allows more"
                )
            if messages and self._verdict is None:
                self._leaving.wait(max(0.0, 0.5 * BEAT_S))
        if self._verdict is not None and not self._leaving.is_set():
            self._end()

    def _end(self) -> None:
        """The run has failed: the main thread hears of it if it listens, else this process ends all the same."""
        self._heard.set()
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            if self._leaving.wait(0.1):
                return
        error = self._peer_error()
        if self._exit_code is None:
            report_failure(error)
        end_process(error.exit_code if self._exit_code is None else self._exit_code)

    def _peer_error(self) -> PeerError:
        return PeerError(str(self._verdict))
