"""A trial's own world: namespaces of its own where the system permits them, and what is left there at the end.

Shared memory, ports, abstract sockets and mounts of a trial are then seen by nobody else, so whatever is found
afterwards was left by the trial. Processes that outlive their parents become children of the trial's own process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWIPC, _NEWNET, _NEWUSER = 0x00020000, 0x08000000, 0x40000000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LISTENS = "0A"


def permitted() -> bool:
    """Whether this process may have namespaces of its own; asked of a child, which keeps them."""
    child = os.fork()
    if child == 0:
        try:
            enter()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def enter() -> None:
    """Mounts, network, shared memory of this process's own; OSError where the system does not permit it."""
    uid, gid = os.getuid(), os.getgid()
    unshare(_NEWNS | _NEWIPC | _NEWNET | (_NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    mount("tmpfs", "/dev/shm", kind="tmpfs")
    _loopback_up()


def _loopback_up() -> None:
    """What `ip link set lo up` does; not every machine has that command."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name, flags = struct.unpack(
            "16sH", fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))[:18]
        )
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", name, flags | up))


def unshare(flags: int) -> None:
    """Leave namespaces; os.unshare came with Python 3.12."""
    _checked(_LIBC.unshare(flags), "unshare")


def own_network() -> None:
    """A network of this process's own: another node, as far as sockets reach."""
    unshare(_NEWNET)


def mount(source: str, target: str | Path, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    """What mount(2) does."""
    words = [str(word).encode() for word in (source, target, kind)]
    _checked(_LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def bind(folder: Path, place: Path) -> None:
    """Let a folder be seen in another place, too."""
    mount(str(folder), place, flags=_MS_BIND)


def small_disk(folder: Path, *, kibibytes: int) -> None:
    """A disk of its own for a folder, with room for this much more than what is there."""
    held = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    copy = folder.with_name(folder.name + ".moved")
    folder.rename(copy)
    folder.mkdir()
    mount("tmpfs", folder, kind="tmpfs", options=f"size={held + 1024 * kibibytes}")
    subprocess.run(["cp", "-a", f"{copy}/.", str(folder)], check=True)
    subprocess.run(["rm", "-rf", str(copy)], check=True)


def resize_disk(folder: Path, *, mebibytes: int) -> None:
    """Make room on a small disk, as somebody does who deletes other files."""
    mount("tmpfs", folder, kind="tmpfs", flags=_MS_REMOUNT, options=f"size={mebibytes}m")


def make_read_only(folder: Path, *, read_only: bool = True) -> None:
    """Let nobody write to a folder, root neither; or let them again."""
    if not os.path.ismount(folder):
        bind(folder, folder)
    mount("none", folder, flags=_MS_REMOUNT | _MS_BIND | (_MS_RDONLY if read_only else 0))


def adopt_orphans() -> None:
    """What loses its parent becomes a child of this process."""
    _checked(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """A trial does not outlive the campaign, nor a command the trial."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def descendants(root: int) -> dict[int, str]:
    """Processes below this one that have not ended, by name."""
    parents: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            parents.setdefault(int(parent), []).append(int(entry.name))
            if state not in "ZX":
                names[int(entry.name)] = f"{name} ({state})"
    found, waiting = {}, [root]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            if child in names:
                found[child] = names[child]
    return found


def leftovers(
    temporary: Path, *, isolated: bool, but: Collection[int] = (), patience: float = 5.0
) -> list[str]:
    """What this trial's programs have left: processes, shared memory, sockets, ports, temporary files."""
    deadline = time.monotonic() + patience
    while (running := descendants(os.getpid()).keys() - set(but)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = descendants(os.getpid())
    found = [f"process {names[pid]}" for pid in running if pid in names]
    found += [f"temporary file {path.relative_to(temporary)}" for path in sorted(temporary.rglob("*"))]
    if isolated:
        found += [f"shared memory {path}" for path in sorted(Path("/dev/shm").iterdir())]
        found += [f"shared memory {line.split()[0]}" for line in _lines("/proc/sysvipc/shm")]
        found += _sockets() if running else []
    return found


def _sockets() -> list[str]:
    """Listening sockets of this network; without a process that holds it no socket is left."""
    tcp = [line.split() for name in ("tcp", "tcp6") for line in _lines(f"/proc/net/{name}")]
    found = [f"port {int(words[1].rsplit(':', 1)[1], 16)}" for words in tcp if words[3] == _LISTENS]
    unix = [line.split() for line in _lines("/proc/net/unix")]
    return found + [f"unix socket {words[7]}" for words in unix if len(words) > 7]


def _lines(path: str) -> list[str]:
    """A table of the kernel without its heading."""
    try:
        return Path(path).read_text().splitlines()[1:]
    except OSError:
        return []


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
