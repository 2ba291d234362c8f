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
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from node_ranks import WAIT_S, Shape, check_namespaces, run, shapes_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from freescale.comm import Transport
from freescale.comm.traffic import send_keys
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.two_stage import TwoStageTransport
from freescale.comm.world import gather_facts
from freescale.embedding import RowwiseAdagrad, TableSpec, exchange_all_ids, find_overlaps
from freescale.embedding.sharding.plan import TablePlan

ONE, MERGED, TWO = WAYS = ("one stage", "one stage, merged", "two stages")


def messages_of(shape: Shape, way: str) -> tuple[int, int]:
    """Exchanges of a batch and messages of a rank in each, where sizes are as expected."""
    if way == TWO:
        return 2, shape.nodes - 1 + shape.local - 1
    return (3 if way == ONE else 2), shape.ranks - 1


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
        MERGED: TwoStageTransport(group, flat, timeout_s=WAIT_S),
        TWO: TwoStageTransport(group, found, timeout_s=WAIT_S),
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
    told = {
        name: (getattr(channel, "num_messages", 0) - sent[name]) / total for name, channel in ways.items()
    }
    told[ONE] = 3 * (shape.ranks - 1)
    return {"cpu": cpu, "wall": wall, "messages": told}


def summary(shape: Shape, way: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the ranks, then median and range over the rounds."""
    by_round = np.array([one["cpu"][way] for one in ranks]).mean(0)
    exchanges, per_exchange = messages_of(shape, way)
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
    check_namespaces(options)
    rows = []
    print(f"{'nodes x ranks':14} {'way':19} {'messages':>9} {'CPU us a rank and batch':>25} {'wall ms':>8}")
    for shape in shapes_of(options.shapes):
        ranks = run(measure, shape, options)
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
