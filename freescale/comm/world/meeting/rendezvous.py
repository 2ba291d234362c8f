"""How the processes of a run that several machines may share find each other, and say whom they wait for.

A store may outlive a run: torchrun keeps one over restarts, with the addresses of processes that are dead. So every
process draws a name of its own, rank 0 answers to those names with the number of a round nobody has used, and what is
kept for this round lies under it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from freescale.comm.world.watch import LINE, FailureNote, say
from freescale.errors import FreeScaleError, PeerError, Preempted, TrainingError

_PREFIX = "freescale"
_FIRST_WORD_S = 3.0
_NEXT_WORD_S = 15.0
_LOOK_S = 0.05
_NEWCOMERS_S = 2.0
_WORD_S = 10.0
_READ_S = 2.0  # so long the store stays, for the other to read why


@dataclass
class Patience:
    """Waits, says so now and then, and gives up.

    Args:
        seconds: for how long.
        what: () -> whom or what is waited for, in words.
        word: when to say so next.
    """

    seconds: float
    what: Callable[[], str]
    _started: float = field(default_factory=time.monotonic)
    word: float = _FIRST_WORD_S

    def pause(self, for_s: float = _LOOK_S) -> None:
        """A moment; raises when the time is over."""
        waited = time.monotonic() - self._started
        if waited > self.seconds:
            raise TrainingError(
                f"gave up after {self.seconds:g} s: {self.what()}",
                next_step="start every rank with the same address and number of ranks; comm.timeout_s allows more time",
            )
        if waited > self.word:
            self.word = waited + _NEXT_WORD_S
            say(f"{self.what()} ({waited:.0f} s)")
        time.sleep(for_s)


class Meeting:
    """A store for one round of one run, which all of its processes and no others have agreed on.

    Args:
        rank: this one.
        num_ranks: how many there are.
        address: where the store is.
        port: the same.
        serves: whether this process is to open the store, as rank 0 is where no launcher has.
        timeout_s: how long to wait for the others.
    """

    def __init__(
        self, rank: int, num_ranks: int, address: str, port: int, *, serves: bool, timeout_s: float
    ) -> None:
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self._place = (address, port)
        self._base = _open_store(address, port, serves=serves, timeout_s=timeout_s)
        self._store = PrefixStore(_PREFIX, self._base)
        self._own = uuid.uuid4().hex
        self._answered = 0
        try:
            self._meet()
        except RuntimeError as error:
            raise TrainingError(
                f"the store of the run at {address}:{port} has closed: rank 0 has ended",
                got=str(error).strip().splitlines()[0],
                next_step="look at what rank 0 said, then start every rank again",
            ) from None
        self.store = PrefixStore(f"{_PREFIX}/{self.round}", self._base)

    def refuse_newcomers(self) -> None:
        """On rank 0, from now on: a process that comes to a run that goes on hears that its seat is taken."""
        threading.Thread(target=self._refuse, name="refuse newcomers", daemon=True).start()

    def _refuse(self) -> None:
        # A connection to the store serves one question at a time: this thread has its own.
        try:
            store = PrefixStore(_PREFIX, _open_store(*self._place, serves=False, timeout_s=self._timeout_s))
            while True:
                for hello in self._new_hellos(store):
                    wrong = self._mismatch(hello)
                    text = wrong or (
                        f"this run goes on already: rank {hello['rank']} is "
                        + json.loads(store.get(f"{self.round}/seat/{hello['rank']}"))["who"]
                    )
                    answer = {"refused": text, "number": wrong is not None}
                    store.set(f"round/{hello['name']}", json.dumps(answer))
                time.sleep(_NEWCOMERS_S)
        except (RuntimeError, FreeScaleError):
            return  # the store has closed: nobody can come

    def _meet(self) -> None:
        number = self._store.add("hellos", 1)
        host = socket.gethostname()
        hello = {"rank": self._rank, "num_ranks": self._num_ranks, "name": self._own, "host": host}
        self._store.set(f"hello/{number}", json.dumps(hello))
        self.round = uuid.uuid4().hex if self._rank == 0 else self._hear()
        self._take_seat()
        if self._rank == 0:
            self._gather()
        else:
            self._wait_for_start()

    def _hear(self) -> str:
        """The number of the round, from rank 0."""
        key = f"round/{self._own}"
        self._wait_for(key, lambda: "waiting for rank 0")
        answer = json.loads(self._store.get(key))
        if "refused" in answer:
            own_rank = "give every process of a run a rank of its own (RANK)"
            raise TrainingError(answer["refused"], next_step=_same_number() if answer["number"] else own_rank)
        return str(answer["round"])

    def _take_seat(self) -> None:
        """Of two processes that call themselves the same rank the first takes part."""
        mine = json.dumps({"name": self._own, "who": _who()})
        held = json.loads(self._store.compare_set(f"{self.round}/seat/{self._rank}", "", mine))
        if held["name"] != self._own:
            raise TrainingError(
                f"rank {self._rank} was started twice: it is {held['who']}",
                next_step="give every process of a run a rank of its own (RANK)",
            )

    def _gather(self) -> None:
        """Answer everybody until every seat is taken."""
        seats = [f"{self.round}/seat/{rank}" for rank in range(self._num_ranks)]
        patience = Patience(self._timeout_s, self._missing)
        while not self._store.check(seats):
            self._look_for_absent()
            for hello in self._new_hellos(self._store):
                self._answer(hello)
            patience.pause()
        self._store.set(f"{self.round}/start", "now")

    def _look_for_absent(self) -> None:
        """A rank that failed before it came has left word."""
        for rank in range(1, self._num_ranks):
            if self._store.check([f"absent/{rank}"]):
                note = FailureNote.made_of(json.loads(self._store.get(f"absent/{rank}")))
                if note is not None:
                    raise PeerError(f"rank {rank} on {note.host} failed before it joined: {note.message}")

    def _wait_for_start(self) -> None:
        over = f"{self.round}/over"

        def look() -> None:
            if self._store.check([over]):
                raise TrainingError(self._store.get(over).decode(), next_step=_same_number())

        waiting = f"waiting for all of {self._num_ranks} ranks"
        self._wait_for(f"{self.round}/start", lambda: waiting, look)

    def _wait_for(
        self, key: str, what: Callable[[], str], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        patience = Patience(self._timeout_s, what)
        while not self._store.check([key]):
            meanwhile()
            patience.pause()

    def _answer(self, hello: Mapping[str, Any]) -> None:
        """Tell a process the number of the round, or that it was started for another run than this one."""
        wrong = self._mismatch(hello)
        answer = {"refused": wrong, "number": True} if wrong else {"round": self.round}
        self._store.set(f"round/{hello['name']}", json.dumps(answer))
        if wrong and not store_of_launcher():  # there it may be a dead process of an earlier round
            self._store.set(f"{self.round}/over", wrong)  # for those who have a seat already
            with contextlib.suppress(Preempted):  # by a launcher, as they have ended
                time.sleep(_READ_S)
            raise TrainingError(wrong, next_step=_same_number())

    def _mismatch(self, hello: Mapping[str, Any]) -> str | None:
        rank, num_ranks = hello["rank"], hello["num_ranks"]
        if num_ranks == self._num_ranks:
            return None
        told = f"rank {rank} on {hello['host']} was started as one of {num_ranks} ranks"
        return f"{told}, rank 0 on {socket.gethostname()} as one of {self._num_ranks}"

    def _new_hellos(self, store: Store) -> list[dict[str, Any]]:
        """Of processes that have come since the last look; those of dead ones do no harm."""
        number = store.add("hellos", 0)
        new = [json.loads(store.get(f"hello/{each}")) for each in range(self._answered + 1, number + 1)]
        self._answered = number
        return [hello for hello in new if hello["name"] != self._own]

    def _missing(self) -> str:
        seats = {rank: f"{self.round}/seat/{rank}" for rank in range(self._num_ranks)}
        missing = [rank for rank, key in seats.items() if not self._store.check([key])]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        here = self._num_ranks - len(missing)
        return f"waiting for ranks {names}: {here} of {self._num_ranks} are here"


def send_word(note: FailureNote) -> None:
    """From a rank that failed before it joined to rank 0, which waits for it; where rank 0 has a store of its own."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if note.rank == 0 or not address or not port or LINE in os.environ or store_of_launcher():
        return
    with contextlib.suppress(RuntimeError, FreeScaleError, ValueError):
        store = _open_store(address, int(port), serves=False, timeout_s=_WORD_S, silent=True)
        PrefixStore(_PREFIX, store).set(f"absent/{note.rank}", json.dumps(asdict(note)))


def store_of_launcher() -> bool:
    """Whether torchrun keeps the store, and with it what earlier processes have left there."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _same_number() -> str:
    """What to do where ranks were started for runs of another size."""
    if LINE in os.environ:
        return "give every machine the same --nnodes and --nproc"
    return "start every rank with the same number of ranks (WORLD_SIZE)"


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _open_store(address: str, port: int, *, serves: bool, timeout_s: float, silent: bool = False) -> Store:
    timeout = datetime.timedelta(seconds=timeout_s)
    if not serves:
        _reach(address, port, timeout_s=timeout_s, silent=silent)
    try:
        return _in_time(
            lambda: TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timeout),
            timeout_s=timeout_s,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(
            f"port {port} of this machine is not free for the store of the run"
            if serves and "EADDRINUSE" in str(error)
            else f"the store of the run at {address}:{port} does not answer",
            got=reason,
            next_step="choose another MASTER_PORT, the same on every machine"
            if serves
            else "give every machine the address and port of rank 0 (MASTER_ADDR, MASTER_PORT)",
        ) from None


def _in_time(open_store: Callable[[], Store], *, timeout_s: float) -> Store:
    """A store, unless whoever listens there never answers: torch would wait for ever."""
    opened: list[Store | Exception] = []

    def work() -> None:
        try:
            opened.append(open_store())
        except Exception as error:
            opened.append(error)

    thread = threading.Thread(target=work, name="open the store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not opened:
        raise TimeoutError(f"no answer within {timeout_s:g} s: somebody else listens there")
    if isinstance(opened[0], Exception):
        raise opened[0]
    return opened[0]


def _reach(address: str, port: int, *, timeout_s: float, silent: bool) -> None:
    """Wait until somebody listens there, and say for whom."""
    reason = ""
    patience = Patience(timeout_s, lambda: f"waiting for {address}:{port}: {reason}")
    if silent:
        patience.word = math.inf
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        patience.pause(0.2)
