"""Ranks watch each other: who has failed, who is gone, who is silent; all hear of it within seconds.

Every rank keeps one connection to rank 0, over which it sends a sign of life a second. The kernel closes it when the
process ends, however it ends; a machine that is cut off sends nothing. Rank 0 waits a moment for the best explanation
and tells everybody. Ranks that the launcher of one machine has started send their signs to it: it sees them end itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from freescale.comm.world.failures import (
    LINE,
    FailureNote,
    end_process,
    first_cause,
    report_failure,
    say,
    tell_launcher,
    was_reported,
)
from freescale.comm.world.liveness import BEAT_S, RESUMES, Liveness, Pulse, SignOfLife, silence
from freescale.errors import EXIT_PEER, PeerError, Preempted

_GRACE_S = 1.0
"""So long after the first sign of trouble a better explanation may come."""
_LEAVE_S = 5.0
"""So long the main thread may take to end by itself, once the run has failed elsewhere."""
_HELLO_S = 5.0
_MAX_STRANGERS = 64


class Watch:
    """What a rank knows of the others; one of these in every process that has joined a run."""

    def failed(self, error: BaseException) -> BaseException:
        """Tell of an error on its way out of this rank; returns what to raise: the cause, if that is elsewhere."""
        report_failure(error)
        return error

    def leave(self) -> None:
        """This rank is done, and everything is well."""

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Around what may fail: the others hear of it, the user reads it, and only then is anything torn down."""
        try:
            yield
        except (Preempted, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            cause = self.failed(error)
            if cause is error:
                raise
            raise cause from error


class LaunchedWatch(Watch):
    """Of a rank whose launcher has started all others, too: it sees them end itself.

    Args:
        pulse: of this rank.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self._done = pulse, threading.Event()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def leave(self) -> None:
        """No more signs, and nobody misses them."""
        self._done.set()
        tell_launcher({"bye": True})

    def _beat(self) -> None:
        with socket.socket(fileno=os.dup(int(os.environ[LINE]))) as line:
            while not self._done.is_set():
                tell_launcher({"sign": asdict(self._pulse.take())})
                heard, _, _ = select.select([line], [], [], BEAT_S)
                if heard and not self._done.is_set():
                    end_process(EXIT_PEER)  # the launcher has said why


@dataclass
class _Line:
    """A connection that carries one JSON object a line; never waits."""

    connection: socket.socket
    rank: int | None = None
    opened: float = field(default_factory=time.monotonic)
    read: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def send(self, message: Mapping[str, Any]) -> None:
        """What cannot go now goes with the next; signs that pile up are dropped."""
        if len(self.unsent) < 1 << 20:
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
            while len(self.read) < 1 << 20:
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
        return messages, gone or len(self.read) >= 1 << 20


class Hub:
    """Rank 0's end: hears of everybody, decides what the trouble is, tells everybody.

    Args:
        num_ranks: how many there are.
        listener: where ranks call.
        token: what they must know.
    """

    def __init__(self, num_ranks: int, listener: socket.socket, *, token: str) -> None:
        self._listener, self._token = listener, token
        self._lines: dict[socket.socket, _Line] = {}
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
        _close_in_children(self)

    def connections(self) -> list[socket.socket]:
        """What this process holds open."""
        return [self._listener, *self._lines]

    def add(self, connection: socket.socket) -> None:
        """A caller; who it is, it must say."""
        connection.setblocking(False)
        self._lines[connection] = _Line(connection)
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
            elif now - line.opened > _HELLO_S:
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

    def _hear(self, line: _Line) -> None:
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
                self._gone.append(_gone(rank, f" on {sign.host}, {sign.where}," if sign else ""))
            if rank is not None:
                self._liveness.left(rank)

    def _drop(self, line: _Line) -> None:
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
        if self._told is None and (known or silent or now - self._trouble >= _GRACE_S):
            self._told = explain(self._notes, self._gone, silent)
            for line in self._lines.values():
                line.send({"verdict": self._told})


def explain(notes: Sequence[FailureNote], gone: Sequence[str], silent: SignOfLife | None) -> str:
    """What happened, in words: a known error, else who is gone, else an unexpected error, else who is silent."""
    cause = first_cause(notes)
    if cause is not None and cause.kind == "known":
        return f"rank {cause.rank} on {cause.host} failed {cause.where}: {cause.message}"
    if gone:
        return gone[0]
    if cause is not None and cause.kind == "unexpected":
        return f"rank {cause.rank} on {cause.host} failed {cause.where}: {cause.message}"
    if silent is not None:
        return silence(silent)
    assert cause is not None
    return f"rank {cause.rank} on {cause.host} lost the others {cause.where}: {cause.message}"


def _gone(rank: int, where: str) -> str:
    why = "killed, out of memory, or its machine is down"
    return f"rank {rank}{where} ended without a word: {why}\n  next:    {RESUMES}"


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
        self._line = _Line(connection)
        self._lock = threading.Lock()
        self._verdict: str | None = None
        self._heard = threading.Event()
        self._leaving = threading.Event()
        self._exit_code: int | None = None
        self._send({"token": token, "rank": pulse.take().rank})
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()
        _close_in_children(self)

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
        if note.kind == "connection" and self._heard.wait(self._silent_s + 2 * _GRACE_S):
            error = self._peer_error()
        report_failure(error)
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
                self._verdict = _gone(0, f" on {self._hub_host}")
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


def open_watch(rank: int, num_ranks: int, *, silent_s: float, store: Any = None) -> Watch:
    """Begin to watch, and to be watched; every rank of a run must call it.

    Args:
        rank: this one.
        num_ranks: how many there are.
        silent_s: how long a rank may give no sign of life.
        store: where rank 0 leaves its address; None: the launcher of this machine watches.
    """
    pulse = Pulse(rank, silent_s=silent_s)
    if store is None:
        return LaunchedWatch(pulse) if LINE in os.environ else Watch()
    if rank == 0:
        return _serve(num_ranks, pulse, store, silent_s=silent_s)
    place = json.loads(store.get("watch"))
    connection = _call(place, rank)
    if connection is None:
        addresses = " or ".join(place["addresses"])
        say(
            f"rank {rank} cannot reach rank 0 on {place['host']} at {addresses}, port {place['port']}: a failure"
            " elsewhere will be noticed by time-outs alone"
        )
        return Watch()
    return HubWatch(connection, pulse, token=place["token"], silent_s=silent_s, hub_host=place["host"])


def _serve(num_ranks: int, pulse: Pulse, store: Any, *, silent_s: float) -> HubWatch:
    """Rank 0 calls itself, too."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(num_ranks)
    listener = socket.create_server(("127.0.0.1" if one_machine else "", 0), backlog=min(4096, 2 * num_ranks))
    token, host = secrets.token_hex(16), socket.gethostname()
    hub = Hub(num_ranks, listener, token=token)
    own, other = socket.socketpair()
    hub.add(other)
    place = {
        "token": token,
        "host": host,
        "port": listener.getsockname()[1],
        "addresses": ["127.0.0.1"] if one_machine else _own_addresses(),
    }
    store.set("watch", json.dumps(place))
    return HubWatch(own, pulse, token=token, silent_s=silent_s, hub=hub, hub_host=host)


def _own_addresses() -> list[str]:
    """Where other machines may reach this one: the interface towards the master first, then what its name means."""
    found = [os.environ["MASTER_ADDR"]] if os.environ.get("MASTER_ADDR") else []
    for towards in [*found, "192.0.2.1"]:  # the last is nobody's: only a route is looked up, nothing is sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((towards, 9))
                found.append(probe.getsockname()[0])
            except OSError:
                continue
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(found[1:] + found[:1]))


def _call(place: Mapping[str, Any], rank: int) -> socket.socket | None:
    """A connection to the hub, by the first address at which it answers to its token."""
    for address in place["addresses"]:
        try:
            connection = socket.create_connection((address, place["port"]), timeout=_HELLO_S)
        except OSError:
            continue
        _Line(connection).send({"token": place["token"], "rank": rank})
        try:
            answer = connection.recv(64)
        except OSError:
            answer = b""
        if answer:
            return connection
        connection.close()
    return None


def _close_in_children(owner: Any) -> None:
    """A loader process forked later must not keep the connections of a rank that is gone."""
    reference = weakref.ref(owner)

    def close() -> None:
        kept = reference()
        for connection in kept.connections() if kept is not None else ():
            connection.close()

    os.register_at_fork(after_in_child=close)
