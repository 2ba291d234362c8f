"""Which of this machine's addresses the others reach.

gloo takes the address of the host's own name. Debian writes that name into /etc/hosts as 127.0.1.1, and the ranks of
other machines then wait at their own door. Where that is so, gloo is told the interface that leads to the first rank.
Ranks of one machine use loopback: what no network reaches, nobody there can disturb.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping

from freescale.comm.world.meeting.launchers import Membership

_GLOO = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737): nobody has it, so it is reached as the rest of the world is."""


def choose_interface(who: Membership, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Name gloo an interface: loopback for one machine, another for several; the line that says so to the user."""
    if who.alone or _GLOO in environment:
        return None
    if who.one_machine and _LOOPBACK in (name for _, name in socket.if_nameindex()):
        environment[_GLOO] = _LOOPBACK
    if who.one_machine or who.master is None:
        return None
    name = socket.gethostname()
    own = addresses_of(name)
    if any(not is_loopback(address) for address in own):
        return None
    known = f"is {own[0]}" if own else "has no address"
    interface = interface_towards(who.master)
    if interface is None:
        return (
            f"this machine's name, {name}, {known} here; set {_GLOO} to the interface that the others reach"
        )
    environment[_GLOO] = interface
    return f"this machine's name, {name}, {known} here, which others cannot reach: {_GLOO}={interface}"


def free_port() -> int:
    """A port that nobody on this machine has just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def addresses_of(host: str) -> list[str]:
    """What a name stands for on this machine; nothing for an unknown one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the machine that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_towards(host: str) -> str | None:
    """The interface by which this machine reaches a host, or, if that is itself, the others; None if it cannot say."""
    interfaces = _interfaces()
    for target in (*addresses_of(host), _ANYWHERE):
        name = interfaces.get(_source_towards(target))
        if name is not None:
            return name
    return next(iter(interfaces.values())) if len(interfaces) == 1 else None


def _source_towards(address: str) -> str:
    """The own address the kernel would send from; a UDP socket that is connected sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Address -> name of every interface that others may reach; IPv4 only."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return {address: name for address, name in found.items() if not is_loopback(address)}
