"""Ranks of this machine that are told to be several nodes, for benchmarks of what travels between nodes."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from freescale.comm.world import free_port
from tests.nodes import INTERFACE, PORT, nodes, why_no_nodes

_CLONE_NEWNET = 0x40000000
WAIT_S = 300.0
"""For a rank that says nothing."""


class Shape(NamedTuple):
    """Nodes, and ranks of each."""

    nodes: int
    local: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.local

    def __str__(self) -> str:
        return f"{self.nodes} x {self.local}"


Measure = Callable[[int, Shape, argparse.Namespace], dict[str, Any]]
"""(rank, shape, options) -> what this rank has found."""


def shapes_of(text: str) -> list[Shape]:
    """2x4,4x4 as shapes."""
    return [Shape(*map(int, part.split("x"))) for part in text.split(",") if part]


def check_namespaces(options: argparse.Namespace) -> None:
    """End here where --namespaces cannot be had."""
    if options.namespaces and (reason := why_no_nodes()):
        raise SystemExit(f"--namespaces: {reason}")


def run(
    measure: Measure, shape: Shape, options: argparse.Namespace, *, rate_mbit: float | None = None
) -> list[dict[str, Any]]:
    """What every rank of a shape has measured; with options.namespaces each node is a network namespace."""
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        nets: list[int | None] = [None] * shape.nodes
        where = f"tcp://127.0.0.1:{free_port()}"
        if options.namespaces:
            machines = stack.enter_context(nodes(shape.nodes, rate_mbit=rate_mbit))
            nets, where = [each._holder for each in machines], f"tcp://{machines[0].address}:{PORT}"
        pipes, processes = [], []
        for rank in range(shape.ranks):
            receive, send = context.Pipe(duplex=False)
            given = (measure, rank, shape, where, nets[rank // shape.local], options, send)
            processes.append(context.Process(target=_be_rank, args=given, daemon=True))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        try:
            found = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(WAIT_S):
                    raise SystemExit(f"{shape}: rank {rank} has said nothing for {WAIT_S:.0f} s")
                found.append(pipe.recv())
                if isinstance(found[-1], str):
                    raise SystemExit(f"{shape}: {found[-1]}")
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()


def _be_rank(
    measure: Measure,
    rank: int,
    shape: Shape,
    where: str,
    net: int | None,
    options: argparse.Namespace,
    pipe: Any,
) -> None:
    """One process: join the others, measure, tell."""
    torch.set_num_threads(1)
    try:
        if net is not None:
            with open(f"/proc/{net}/ns/net") as place:
                if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(shape.ranks),
            LOCAL_WORLD_SIZE=str(shape.local),
            GLOO_SOCKET_IFNAME="lo" if net is None else INTERFACE,
        )
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=shape.ranks)
        pipe.send(measure(rank, shape, options))
        dist.barrier()
    except BaseException as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)
