"""How a watch begins: rank 0 listens and leaves its addresses in the store, the others call."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from freescale.comm.world.watch.failures import LINE, say
from freescale.comm.world.watch.hub import HELLO_S, Hub
from freescale.comm.world.watch.hub_watch import HubWatch
from freescale.comm.world.watch.line import Line
from freescale.comm.world.watch.liveness import Pulse
from freescale.comm.world.watch.watches import LaunchedWatch, Watch


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
            connection = socket.create_connection((address, place["port"]), timeout=HELLO_S)
        except OSError:
            continue
        Line(connection).send({"token": place["token"], "rank": rank})
        try:
            answer = connection.recv(64)
        except OSError:
            answer = b""
        if answer:
            return connection
        connection.close()
    return None
