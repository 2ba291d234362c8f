"""Groups of gloo that other users of the machine cannot take part in, read, or hold up once they are open.

gloo listens on a TCP port and believes whoever connects: eight bytes name the rank, and the kernel lets every user of
the machine connect. So, as soon as a group is open, connections of other users are cut before anything was sent over
them, and a filter drops every later packet that would begin a new one: no file descriptors can be used up, either.

What remains: in the milliseconds between the port and the last connection, another user of the machine who connects in
the place of a rank makes the start fail, with a message. Between machines, users of other hosts are not told apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.errors import TrainingError

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of classic BPF: return 0 bytes of the packet

Ends = tuple[tuple[str, int], tuple[str, int]]
"""(address, port) of the near and of the far end."""


def open_privately(open_group: Callable[[], object]) -> dist.ProcessGroup:
    """A group of gloo for these ranks alone; every rank must call it.

    Args:
        open_group: opens it, or the first group of the process if it returns nothing.
    """
    before = set(_sockets())
    group = open_group() or dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    strangers = _shut({inode: file for inode, file in _sockets().items() if inode not in before})
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        if not strangers:
            raise
        users = ", ".join(map(str, sorted(strangers)))
        raise TrainingError(
            "another user of this machine has connected to a port of this run in the place of a rank",
            got=f"user {users}; the connection was cut before anything was sent",
            next_step="ask that user, then start again; on a machine of your own this cannot happen",
        ) from error
    return group


def _shut(files: dict[str, int]) -> set[int]:
    """Take no more connections at these sockets, and cut those of other users; returns the users."""
    opened = {}
    for inode, file in files.items():
        try:
            opened[inode] = socket.socket(fileno=os.dup(file))
        except OSError:
            continue  # closed meanwhile
    try:
        inet = [each for each in opened.values() if _is_tcp(each)]
        doors = [each for each in inet if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        ports = {each.getsockname()[1] for each in doors}
        for door in doors:
            _drop_all(door)
        inbound = [each for each in inet if each not in doors and each.getsockname()[1] in ports]
        return _cut_strangers(inbound)
    finally:
        for each in opened.values():
            each.close()


def _cut_strangers(inbound: list[socket.socket]) -> set[int]:
    users = _users() if inbound else {}
    strangers = set()
    for connection in inbound:
        ends = _ends(connection)
        user = users.get((ends[1], ends[0])) if ends else None
        # Not in the table: from another machine, or, on loopback, gone again.
        if user is not None and user != os.geteuid():
            strangers.add(user)
            connection.shutdown(socket.SHUT_RDWR)
    return strangers


def _drop_all(door: socket.socket) -> None:
    """Let the kernel drop whatever comes to a listening socket; connections it has accepted are not touched."""
    code = ctypes.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("HP", 1, ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a kernel without filters: strangers are cut off, but may knock later
        door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _sockets() -> dict[str, int]:
    """Inode -> file of every socket of this process."""
    if sys.platform != "linux":
        return {}
    found = {}
    for file in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(file)
    return found


def _is_tcp(each: socket.socket) -> bool:
    return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM


def _ends(connection: socket.socket) -> Ends | None:
    try:
        near, far = connection.getsockname(), connection.getpeername()
    except OSError:
        return None  # not connected any more
    return (_plain(near[0]), near[1]), (_plain(far[0]), far[1])


def _users() -> dict[Ends, int]:
    """Who holds the near end of every TCP connection of this machine, as far as its network reaches."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, near, far, _, _, _, _, user, *_ = line.split()
            found[_read(near), _read(far)] = int(user)
    return found


def _read(end: str) -> tuple[str, int]:
    """`0100007F:1F90` -> ("127.0.0.1", 8080): words of the address in this machine's order of bytes."""
    address, port = end.split(":")
    return _address(address), int(port, 16)


@functools.lru_cache(maxsize=1024)  # few machines, and a line for each of their connections
def _address(word: str) -> str:
    words = bytes.fromhex(word)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return _plain(str(ipaddress.ip_address(words)))


def _plain(address: str) -> str:
    """The same text for the same address, also where IPv4 travels inside IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    inside = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(inside or parsed)
