r"""Ids, their counts and bits about them of many ranks: one stage (a message a rank) beside two (a node).

    python benchmarks/id_exchange.py [--shapes 2x4,4x4,4x8] [--batches 20] [--rounds 5] [--namespaces]

A shape is nodes x ranks of a node. All ranks are processes of this machine on its loopback, and nodes are told to them
as a launcher would (LOCAL_WORLD_SIZE); with --namespaces each node is a network namespace (tests/nodes.py; needs root),
with frames on a wire between them.

Checked first: what owners hear of random batches (ids, their order, counts, bits) is the same by every way. Then, in
one program, rounds of all ways alternate. A batch is what the prioritized schedule sends two batches ahead: counts,
ids and bits, with --ids ids from every rank to every other, as many as a rank of 256 asks for. Time is CPU time of
the process, gloo's threads and the kernel's part included, since the ranks share the cores: a mean over the ranks,
and over the rounds its median and range. Ways:

    one stage              counts, ids, bits: three exchanges by gloo, each with a message for every rank
    one stage, merged      counts travel with the ids: two exchanges
    two stages             the same, by nodes

The cost of a message, and of an exchange beside its messages, is fitted to all shapes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from freescale.comm import Transport
from freescale.comm.traffic import send_keys
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.two_stage import TwoStageTransport
from freescale.comm.world import gather_facts
from freescale.embedding import RowwiseAdagrad, TableSpec, exchange_all_ids, find_overlaps
from freescale.embedding.sharding.plan import TablePlan
from tests.nodes import INTERFACE, PORT, nodes, why_no_nodes

ONE, MERGED, TWO = WAYS = ("one stage", "one stage, merged", "two stages")
_CLONE_NEWNET = 0x40000000
_WAIT_S = 300.0


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

    def messages(self, way: str) -> tuple[int, int]:
        """Exchanges of a batch and messages of a rank in each, where sizes are as expected."""
        if way == TWO:
            return 2, self.nodes - 1 + self.local - 1
        return (3 if way == ONE else 2), self.ranks - 1


def plan_of(num_rows: int, num_ranks: int) -> TablePlan:
    """A table spread over the ranks."""
    spec = TableSpec(name="item", num_rows=num_rows, dim=4, optimizer=RowwiseAdagrad())
    return TablePlan(spec=spec, num_ranks=num_ranks, replicated=False)


def open_ways(shape: Shape) -> dict[str, Any]:
    """Every way between the ranks of the first group, nodes as the ranks find them."""
    group = dist.group.WORLD
    assert group is not None
    found = gather_facts(group, torch.device("cpu")).nodes
    assert [len(ranks) for ranks in found] == [shape.local] * shape.nodes, found
    flat = [[rank] for rank in range(shape.ranks)]
    return {
        ONE: CollectiveTransport(group),
        MERGED: TwoStageTransport(group, flat, timeout_s=_WAIT_S),
        TWO: TwoStageTransport(group, found, timeout_s=_WAIT_S),
    }


def check(ways: dict[str, Any], rank: int, num_ranks: int) -> None:
    """What owners hear of random batches, by every way; raises AssertionError where anything differs."""
    rng = random.Random(rank)
    for size in (0, 3, 200, 5000):
        plans = [plan_of(rows, num_ranks) for rows in (50 * num_ranks, 3)]
        asked = [
            [torch.tensor([rng.randrange(plan.spec.num_rows) for _ in range(rng.choice([0, size]))]).long()
             for plan in plans]
            for _ in range(2)
        ]  # fmt: skip
        heard = {}
        for name, channel in ways.items():
            before, after = (exchange_all_ids(plans, rows, channel=channel) for rows in asked)
            marks = find_overlaps(list(zip(before, after)), channel=channel)
            heard[name] = (
                [(one.route.send, one.route.receive, one.route.largest) for one in (*before, *after)],
                [part.tolist() for one in (*before, *after) for part in (one.unique, *one.owned.tensors())],
                [(mark.asked.tolist(), mark.owned.tolist()) for pair in marks for mark in pair],
            )
        assert all(one == heard[ONE] for one in heard.values()), "the ways do not bring the same"


def send_batch(channel: Transport, keys: torch.Tensor, edges: torch.Tensor) -> None:
    """Counts, ids and bits of one batch."""
    (route,), _ = send_keys([keys], [edges], channel=channel)
    send, receive = ([max(1, count // 4) for count in counts] for counts in (route.receive, route.send))
    channel.start(torch.zeros(sum(send), dtype=torch.uint8), send=send, receive=receive).wait()


def measure(rank: int, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of this rank for a batch, by way and round, and messages."""
    ways = open_ways(shape)
    check(ways, rank, shape.ranks)
    plan, rng = plan_of(10_000 * shape.ranks, shape.ranks), np.random.default_rng(rank)
    edges = torch.tensor(plan.edges())
    batches = [
        torch.from_numpy(np.unique(rng.integers(0, plan.spec.num_rows, options.ids * shape.ranks)))
        for _ in range(8)
    ]
    for channel in ways.values():
        for keys in batches:
            send_batch(channel, keys, edges)
    cpu: dict[str, list[float]] = {name: [] for name in WAYS}
    wall: dict[str, list[float]] = {name: [] for name in WAYS}
    sent = {name: getattr(channel, "num_messages", 0) for name, channel in ways.items()}
    for _ in range(options.rounds):
        for name, channel in ways.items():
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            for number in range(options.batches):
                send_batch(channel, batches[number % len(batches)], edges)
            cpu[name].append((time.process_time() - spent) / options.batches)
            wall[name].append((time.perf_counter() - began) / options.batches)
    total = options.rounds * options.batches
    messages = {
        name: (getattr(channel, "num_messages", 0) - sent[name]) / total for name, channel in ways.items()
    }
    messages[ONE] = 3 * (shape.ranks - 1)
    return {"cpu": cpu, "wall": wall, "messages": messages}


def be_rank(
    rank: int, shape: Shape, where: str, net: int | None, options: argparse.Namespace, pipe: Any
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


def run(shape: Shape, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What every rank of a shape has measured."""
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        nets: list[int | None] = [None] * shape.nodes
        where = f"tcp://127.0.0.1:{free_port()}"
        if options.namespaces:
            machines = stack.enter_context(nodes(shape.nodes))
            nets, where = [each._holder for each in machines], f"tcp://{machines[0].address}:{PORT}"
        pipes, processes = [], []
        for rank in range(shape.ranks):
            receive, send = context.Pipe(duplex=False)
            given = (rank, shape, where, nets[rank // shape.local], options, send)
            processes.append(context.Process(target=be_rank, args=given, daemon=True))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        try:
            found = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(_WAIT_S):
                    raise SystemExit(f"{shape}: rank {rank} has said nothing for {_WAIT_S:.0f} s")
                found.append(pipe.recv())
                if isinstance(found[-1], str):
                    raise SystemExit(f"{shape}: {found[-1]}")
            return found
        finally:
            for process in processes:
                process.kill()
                process.join()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def summary(shape: Shape, way: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the ranks, then median and range over the rounds."""
    by_round = np.array([one["cpu"][way] for one in ranks]).mean(0)
    exchanges, per_exchange = shape.messages(way)
    return {
        "shape": str(shape),
        "nodes": shape.nodes,
        "local": shape.local,
        "way": way,
        "exchanges": exchanges,
        "messages": float(np.mean([one["messages"][way] for one in ranks])),
        "expected_messages": exchanges * per_exchange,
        "cpu_us": 1e6 * statistics.median(by_round),
        "least_us": 1e6 * float(by_round.min()),
        "most_us": 1e6 * float(by_round.max()),
        "wall_ms": 1e3 * statistics.median(np.array([one["wall"][way] for one in ranks]).mean(0)),
    }


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of an exchange beside its messages, of a message by gloo, of one inside a node.

    Least squares over all shapes and ways; the wrapping of two stages has a fixed part of its own.
    """
    left, right = [], []
    for row in rows:
        one = row["way"] == ONE
        between = row["nodes"] - 1 if row["way"] == TWO else row["nodes"] * row["local"] - 1
        inside = row["local"] - 1 if row["way"] == TWO else 0
        left.append(row["exchanges"] * np.array([one, not one, between, inside]))
        right.append(row["cpu_us"])
    weights = 1 / np.array(right)
    found, *_ = np.linalg.lstsq(np.array(left) * weights[:, None], np.ones(len(right)), rcond=None)
    names = ("plain_exchange_us", "framed_exchange_us", "gloo_message_us", "inside_message_us")
    off = np.abs(np.array(left) @ found / np.array(right) - 1)
    return {**dict(zip(names, map(float, found))), "worst_fit_off": float(off.max())}


def main() -> None:
    """Measure all shapes and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="2x4,4x4,4x8", help="nodes x ranks of a node")
    parser.add_argument("--batches", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", type=int, default=36, help="from every rank to every other")
    parser.add_argument("--namespaces", action="store_true", help="nodes are network namespaces")
    options = parser.parse_args()
    if options.namespaces and (reason := why_no_nodes()):
        raise SystemExit(f"--namespaces: {reason}")
    rows = []
    print(f"{'nodes x ranks':14} {'way':19} {'messages':>9} {'CPU us a rank and batch':>25} {'wall ms':>8}")
    for text in options.shapes.split(","):
        shape = Shape(*map(int, text.split("x")))
        ranks = run(shape, options)
        for way in WAYS:
            row = summary(shape, way, ranks)
            rows.append(row)
            spread = f"{row['cpu_us']:,.0f} ({row['least_us']:,.0f}-{row['most_us']:,.0f})"
            print(
                f"{shape!s:14} {way:19} {row['messages']:9.1f} {spread:>25} {row['wall_ms']:8.1f}", flush=True
            )
    fit = fitted(rows) if len({row["shape"] for row in rows}) > 1 else {}
    for name, value in fit.items():
        print(f"{name:20} {value:8.2f}")
    told = {"benchmark": "id_exchange", "machine": platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({**told, "options": vars(options), "rows": rows, "fit": fit}))


if __name__ == "__main__":
    main()
