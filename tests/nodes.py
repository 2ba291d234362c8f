"""Network namespaces as machines: own name, hosts file, network and shared memory, a wire of a chosen rate and delay.

    with nodes(2, delay_ms=20, rate_mbit=100) as machines:
        process = machines[0].popen(["hostname"])
        machines[1].link_down()

Files are shared by all of them, as a cluster's are. The namespaces are held by a guard, a process of its own: when the
block ends, or whoever made them dies in whatever way, it ends every process inside, and with the last one the kernel
takes namespaces and wires away. Nothing has a name on the host, so nothing can be left over or met twice.

Two machines on a wire without rate, delay and loss are joined by a veth pair; others by a switch in the guard that
holds every frame back for the time its bytes need, and the delay. So the wire's time is known to the byte: tbf lets the
first bytes of a burst through at once and throws frames away, and many kernels come without netem. Needs root; tests
ask `why_no_nodes` and skip.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import heapq
import itertools
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

INTERFACE = "eth0"
PORT = 29500
"""For whoever needs one: every machine has all ports to itself."""


class Node:
    """A machine: where commands run."""

    def __init__(self, name: str, address: str, holder: int) -> None:
        self.name, self.address = name, address
        self._holder = holder

    def command(self, args: Sequence[str]) -> list[str]:
        """The command that runs another one there: in the present folder, as the process that is started."""
        enter = ["nsenter", f"--target={self._holder}", "--net", "--uts", "--mount", "--ipc"]
        return [*enter, f"--wd={os.getcwd()}", "--", *args]

    def popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; the process id is that of the command, as the host sees it."""
        return subprocess.Popen(self.command(args), **options)

    def run(self, args: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command there to its end."""
        return subprocess.run(self.command(args), **options)

    def link_down(self) -> None:
        """Cut this machine off: what is sent is lost, connections stay open and know nothing."""
        self._ip("link", "set", INTERFACE, "down")

    def link_up(self) -> None:
        """Join it to the others again."""
        self._ip("link", "set", INTERFACE, "up")

    def bytes_on_wire(self) -> tuple[int, int]:
        """Bytes sent and received since it was made, headers included."""
        lines = Path(f"/proc/{self._holder}/net/dev").read_text().splitlines()
        counters = next(line.split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(counters[9]), int(counters[1])

    def pids(self) -> list[int]:
        """The processes inside, as the host sees them."""
        return [pid for pid in _inside([_wire(self._holder)]) if pid != self._holder]

    def _ip(self, *args: str) -> None:
        self.run(["ip", *args], check=True, capture_output=True)


@contextmanager
def nodes(
    num_nodes: int = 2, *, delay_ms: float = 0.0, rate_mbit: float | None = None, loss: float = 0.0
) -> Iterator[list[Node]]:
    """Machines node-a, node-b, ... on one wire; all that still runs on them is killed at the end of the block.

    Args:
        num_nodes: how many.
        delay_ms: from one machine to another; a round trip takes twice that.
        rate_mbit: what a machine can send, and so nobody loses frames to it; None is as fast as the host copies.
        loss: the share of frames that get lost, always the same ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        wish = json.dumps([num_nodes, delay_ms, rate_mbit, loss, folder])
        guard = subprocess.Popen(
            [sys.executable, "-IS", __file__, wish], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert guard.stdin is not None
        assert guard.stdout is not None
        try:
            answer = json.loads(guard.stdout.readline() or '"the guard of the nodes died"')
            if isinstance(answer, str):
                raise NodesError(answer)
            yield [Node(*each) for each in answer]
        finally:
            guard.stdin.close()  # the guard ends everything when it can read no more
            guard.wait()
            guard.stdout.close()


class NodesError(RuntimeError):
    """The machines could not be made."""


@functools.cache
def why_no_nodes() -> str:
    """Why machines cannot be made here; empty where they can."""
    try:
        with nodes(2, delay_ms=1, rate_mbit=100):
            return ""
    except NodesError as error:
        return str(error)


# From here on: the guard.

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM_TSO4_TSO6 = 7
_VNET_HEADER = 10
_TCP = {
    "tcp_congestion_control": "cubic",  # bbr stops for 200 ms every 10 s to measure
    # What is sent between steps begins at full speed, so that rate and delay tell how long it takes.
    "tcp_slow_start_after_idle": "0",
    "tcp_min_tso_segs": "40",  # few large frames: each costs the switch as much as a small one
    "tcp_rmem": "4096 4194304 16777216",
    "tcp_wmem": "4096 4194304 16777216",
}
"""As clusters are tuned."""


def _guard(num_nodes: int, delay_ms: float, rate_mbit: float | None, loss: float, folder: str) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # a Ctrl-C is for the tests; their end is the guard's
    with suppress(OSError):  # a wire does not wait until the machines' processes leave it a core
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    names = [f"node-{chr(ord('a') + n)}" for n in range(num_nodes)]
    addresses = [f"10.77.0.{n + 1}" for n in range(num_nodes)]
    hosts = Path(folder, "hosts")
    known = zip(["127.0.0.1", *addresses], ["localhost", *names])
    hosts.write_text("".join(f"{address} {name}\n" for address, name in known))
    holders: list[int] = []
    try:
        for name in names:
            holders.append(_hold(name, hosts))
        plain = num_nodes == 2 and not delay_ms and not rate_mbit and not loss
        ports = _join(holders, addresses, switched=not plain)
    except (OSError, subprocess.CalledProcessError) as error:
        _end(holders)
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        _say(f"network namespaces cannot be made here: {said}")
        return
    _say(list(zip(names, addresses, holders)))
    _switch(ports, delay=delay_ms / 1000, byte_s=8e-6 / rate_mbit if rate_mbit else 0.0, loss=loss)
    _end(holders)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _hold(name: str, hosts: Path) -> int:
    """A process that does nothing but be in the namespaces of a machine."""
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        _be_held(name, hosts, write)
    os.close(write)
    with open(read) as pipe:
        if problem := pipe.read():
            os.waitpid(holder, 0)
            raise OSError(problem)
    return holder


def _be_held(name: str, hosts: Path, ready: int) -> NoReturn:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        _must(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
        _must(libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWNS | _CLONE_NEWIPC), "unshare")
        _must(libc.sethostname(name.encode(), len(name)), "sethostname")
        _must(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        _must(libc.mount(bytes(hosts), b"/etc/hosts", None, _MS_BIND, None), "mount of /etc/hosts")
        _must(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mount of /dev/shm")
        for name, value in _TCP.items():
            with suppress(OSError):
                Path("/proc/sys/net/ipv4", name).write_text(value)
        null = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1):
            os.dup2(null, stream)
        os.close(ready)
        while True:
            signal.pause()
    except BaseException as error:
        os.write(ready, str(error).encode())
    finally:
        os._exit(1)


def _must(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(f"{what}: {os.strerror(number)}")


def _join(holders: list[int], addresses: list[str], *, switched: bool) -> list[int]:
    """Give every machine an interface; the ports of the switch where there is one."""
    ports = []
    if switched:
        ports = [_tap(holder) for holder in holders]
    else:
        first, second = (str(holder) for holder in holders)
        veth = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
        _do(["ip", "link", "add", "name", INTERFACE, "netns", first, *veth])
    for holder, address in zip(holders, addresses):
        enter = ["nsenter", f"--target={holder}", "--net"]
        _do([*enter, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE])
        for interface in ("lo", INTERFACE):
            _do([*enter, "ip", "link", "set", interface, "up"])
    return ports


def _do(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _tap(holder: int) -> int:
    """An interface of a machine whose other end is a file: frames can be read from it and written to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/proc/{holder}/ns/net") as there:
        _must(libc.setns(there.fileno(), _CLONE_NEWNET), "setns")
        try:
            port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
            # Frames of 64 kB, cut up by nobody: a frame of 1,500 bytes costs Python as much.
            fcntl.ioctl(port, _TUNSETOFFLOAD, _TUN_F_CSUM_TSO4_TSO6)
        finally:
            _must(libc.setns(own.fileno(), _CLONE_NEWNET), "setns")
    return port


def _switch(ports: list[int], *, delay: float, byte_s: float, loss: float) -> None:
    """Pass frames on, each when its bytes have left and the delay has passed, until there is nobody left for whom."""
    dice, order = random.Random(0), itertools.count()
    port_of: dict[bytes, int] = {}
    sent_at = dict.fromkeys(ports, 0.0)
    held: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([0, *ports], [], [], wait)
        if 0 in readable:
            return
        for port in readable:
            frame = _read(port)
            to, sender = frame[_VNET_HEADER:][:6], frame[_VNET_HEADER + 6 :][:6]
            port_of[sender] = port
            sent_at[port] = max(sent_at[port], time.monotonic()) + byte_s * (len(frame) - _VNET_HEADER)
            if frame and dice.random() >= loss:
                for other in [port_of[to]] if to in port_of else [each for each in ports if each != port]:
                    heapq.heappush(held, (sent_at[port] + delay, next(order), other, frame))
        while held and held[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(held)
            with suppress(OSError):  # its link is down
                os.write(port, frame)


def _read(port: int) -> bytes:
    try:
        return os.read(port, 1 << 17)
    except OSError:  # its link is down
        return b""


def _inside(wires: Collection[str]) -> list[int]:
    """The processes in these network namespaces."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            if _wire(pid) in wires:
                found.append(pid)
    return found


def _wire(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _end(holders: list[int]) -> None:
    """Kill what runs on the machines, and then those that hold them; twice, as somebody may just be entering."""
    wires = {_wire(holder) for holder in holders}
    for _ in range(2):
        while others := [pid for pid in _inside(wires) if pid not in holders]:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for holder in holders:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        holders = []


if __name__ == "__main__":
    _guard(*json.loads(sys.argv[1]))
