"""Several machines under our own launcher: what each is told, and what is wrong with it, said before ranks start."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freescale.comm.world.meeting.environment import DEFAULT_PORT, launched_by
from freescale.comm.world.meeting.launchers import slurm_node
from freescale.comm.world.meeting.network import addresses_of, is_loopback
from freescale.errors import TrainingError


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, as the launcher of one of them sees it.

    Args:
        num_nodes: machines.
        node: this one; the first has rank 0.
        host: name or address of the first.
        port: where its rank 0 waits for the others.
    """

    num_nodes: int
    node: int
    host: str
    port: int

    @property
    def master(self) -> str:
        """Host and port of the first machine."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def nodes_asked_for(
    *,
    nnodes: int | None,
    node_rank: int | None,
    master: str | None,
    nproc: int,
    environment: Mapping[str, str] = os.environ,
) -> Nodes | None:
    """What --nnodes, --node-rank and --master ask for; None for a run on this machine. Refuses contradictions.

    A Slurm step with one task a node and --nproc says all of it without options.
    """
    if "RANK" in environment:
        if nnodes is not None and nnodes > 1:
            raise TrainingError(
                "--nnodes starts ranks of its own, but this process is a rank already",
                got=f"--nnodes {nnodes} under torchrun or another launcher",
                next_step="give --nnodes to torchrun, or start freescale by itself on every machine",
            )
        return None
    if nnodes is None:
        if node_rank is not None or master is not None:
            raise _refused("--nnodes is missing", got="--node-rank or --master without it")
        return _nodes_of_slurm(environment) if nproc > 1 else None
    if node_rank is not None and node_rank >= nnodes:
        raise _refused(
            "--node-rank counts from 0 to --nnodes - 1", got=f"--nnodes {nnodes} --node-rank {node_rank}"
        )
    if nnodes == 1:
        return None
    if node_rank is None or master is None:
        missing = "--node-rank" if node_rank is None else "--master"
        raise _refused(f"{missing} is missing", got=f"--nnodes {nnodes}")
    return Nodes(nnodes, node_rank, *_host_and_port(master))


def check_start(nodes: Nodes, *, say: Callable[[str], None], names_s: float = 60.0) -> None:
    """Refuse a start that cannot succeed, and say at once whom this machine waits for.

    Args:
        nodes: what this launcher was told.
        say: where a line goes.
        names_s: how long a name may be unknown. Clusters learn the names of machines while they start.
    """
    addresses = _await_name(nodes, say=say, names_s=names_s)
    if nodes.node == 0:
        _check_own(nodes, addresses)
        if nodes.host == "localhost" or (nodes.host in addresses and is_loopback(nodes.host)):
            say(f"--master {nodes.host} is this machine for every machine: no other one comes here by it")
        return
    if all(is_loopback(address) for address in addresses):
        raise TrainingError(
            f"--master leads back to this machine, but this is not the first (--node-rank {nodes.node})",
            got=f"{nodes.host} is {addresses[0]} here",
            next_step="use an address of the first machine that the others reach",
        )
    try:
        socket.create_connection((nodes.host, nodes.port), timeout=2.0).close()
    except OSError as error:
        say(f"waiting for {nodes.master}, the first of {nodes.num_nodes} machines: {error.strerror or error}")


def _await_name(nodes: Nodes, *, say: Callable[[str], None], names_s: float) -> list[str]:
    """The addresses of the first machine."""
    addresses = addresses_of(nodes.host)
    if not addresses:
        say(f"this machine does not know {nodes.host} of --master; asking again for {names_s:g} s")
    deadline = time.monotonic() + names_s
    while not addresses:
        if time.monotonic() > deadline:
            raise TrainingError(
                f"--master names a host this machine does not know: {nodes.host}",
                next_step="use its address, or add the name to DNS or /etc/hosts of every machine",
            )
        time.sleep(min(1.0, names_s))
        addresses = addresses_of(nodes.host)
    return addresses


def _check_own(nodes: Nodes, addresses: list[str]) -> None:
    """Rank 0 will listen here: the address must be this machine's, and the port free on all of its addresses."""
    for address in addresses:
        reason = _cannot_listen(address, nodes.port)
        if reason == errno.EADDRNOTAVAIL:
            raise TrainingError(
                "--master names another machine, but --node-rank 0 is the one that it must name",
                got=f"{nodes.host} is {address}, and this is {socket.gethostname()}",
                next_step="give --node-rank 0 to that machine, or --master an address of this one",
            )
        if reason is not None:
            raise _port_taken(nodes, reason)
    reason = _cannot_listen("", nodes.port)
    if reason is not None:
        raise _port_taken(nodes, reason)


def _port_taken(nodes: Nodes, reason: int) -> TrainingError:
    return TrainingError(
        f"port {nodes.port} of this machine cannot be listened on: {os.strerror(reason)}",
        next_step=f"choose another port in --master {nodes.host}:PORT, the same on every machine",
    )


def _cannot_listen(address: str, port: int) -> int | None:
    """Why this process cannot listen there (errno), or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EIO
    return None


def _nodes_of_slurm(environment: Mapping[str, str]) -> Nodes | None:
    """One task a node, each the launcher of its ranks. Several tasks a node are ranks themselves."""
    found = slurm_node(environment)
    if found is not None:
        return Nodes(*found)
    who = launched_by(environment)
    if who is not None and who.num_ranks > 1:
        raise TrainingError(
            f"--nproc starts ranks, but {who.launcher} has started {who.num_ranks} processes already",
            next_step="leave --nproc away, or start one process a machine: srun --ntasks-per-node=1",
        )
    return None


def _host_and_port(master: str) -> tuple[str, int]:
    """`node-a:29500`, `node-a`, `[fd00::1]:29500`."""
    host, separator, port = master.rpartition(":")
    if not separator or master.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = master, str(DEFAULT_PORT)
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _refused("--master is no HOST:PORT", got=f"--master {master}")
    return host.strip("[]"), int(port)


def _refused(what: str, *, got: str) -> TrainingError:
    return TrainingError(
        what,
        got=got,
        allowed="--nnodes N --node-rank 0..N-1 --master HOST:PORT, the same N and HOST:PORT on every machine",
        next_step="docs/clusters.md has recipes",
    )
