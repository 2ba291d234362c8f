r"""Rows asked for once a node (comm.dedup=node) beside once a rank: bytes between nodes, messages and time.

    python benchmarks/rows_once_a_node.py [--shapes 2x2,2x4,4x4] [--namespaces [--rate-mbit 200]] [--counted 32x8,128x8]

A shape is nodes x ranks of a node; all ranks are processes of this machine, told to be nodes as a launcher would
(LOCAL_WORLD_SIZE). With --namespaces each node is a network namespace (tests/nodes.py; needs root), and the bytes of
its interface are counted, headers and all; --rate-mbit is what a node can send.

Checked first, in float64: rows that arrive are equal, and tables agree to 1e-12 after five updates of each way. Then
rounds of both ways alternate in one program. A step is a lookup and an update of --ids Zipf ids a rank, all of it while
the rank stands still. Counted are the rows that ranks of one node get from another, by the routes; their bytes are
those of ids, rows and gradients. CPU time is that of the process, a mean over the ranks; over the rounds median and
range.

--counted draws ids of one node of a larger cluster, without ranks: of every rank as many as 32 histories of a median of
512 have in the simulator, and as many negatives. Beside them stands what the simulator expects. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from node_ranks import Shape, check_namespaces, run, shapes_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from freescale.comm.traffic import open_node_groups, open_node_stages
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.embedding import DirectMap, RowwiseAdagrad, ShardedEmbedding, TableSpec
from freescale.sim.costs.id_traffic import IdModel
from tests.nodes import INTERFACE

RANK, NODE = WAYS = ("once a rank", "once a node")
_EXACT = 1_000_000


def messages(shape: Shape, way: str) -> int:
    """Of a rank to ranks of other nodes, in one exchange."""
    return shape.nodes - 1 if way == NODE else shape.ranks - shape.local


def zipf_ids(rng: np.random.Generator, num_rows: int, count: int) -> np.ndarray[Any, Any]:
    """Ids from 0 on, the n-th with a probability of 1 / n: by their sums up to a million, beyond that by logarithm."""
    exact = min(num_rows, _EXACT)
    sums = np.cumsum(1 / np.arange(1, exact + 1))
    total = sums[-1] + math.log(num_rows / exact)
    drawn = rng.random(count) * total
    found = np.searchsorted(sums, drawn, side="right")
    beyond = drawn >= sums[-1]
    found[beyond] = np.minimum(exact * np.exp(drawn[beyond] - sums[-1]), num_rows - 1)
    return found.astype(np.int64)


def make_tables(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, ShardedEmbedding]:
    """The same table twice, by both ways."""
    group = dist.group.WORLD
    assert group is not None
    spec = TableSpec(
        name="item", num_rows=options.rows, dim=options.dim, optimizer=RowwiseAdagrad(), dtype=dtype
    )
    stages = open_node_stages(open_node_groups(group))
    return {
        RANK: ShardedEmbedding([spec], transport=CollectiveTransport(group)),
        NODE: ShardedEmbedding([spec], transport=CollectiveTransport(group), stages=stages),
    }


def step(table: ShardedEmbedding, rows: torch.Tensor, number: int) -> Any:
    """A lookup and its update; the lookup."""
    lookup = table.lookup("item", rows)
    lookup.rows.grad = torch.cos(lookup.rows.detach() + lookup.unique[:, None])
    table.update(lookup, lr=0.1, step=number)
    return lookup


def between_nodes(lookup: Any, rank: int, shape: Shape) -> int:
    """Rows that a rank gets from other nodes."""
    node = rank // shape.local
    if lookup.relay is not None:
        return sum(count for each, count in enumerate(lookup.route.send) if each != node)
    return sum(count for each, count in enumerate(lookup.route.send) if each // shape.local != node)


def own_wire() -> tuple[int, int]:
    """Bytes sent and received by this node's interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line.split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(counters[9]), int(counters[1])


def measure(rank: int, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways on the same batches."""
    rng, id_map = np.random.default_rng([7, rank]), DirectMap(options.rows)
    batches = [
        id_map.rows(torch.from_numpy(zipf_ids(rng, options.rows, options.ids)))
        for _ in range(options.batches)
    ]
    exact = make_tables(options, torch.float64)
    for number, rows in enumerate(batches[:5]):
        once, often = (step(exact[way], rows, number + 1) for way in (NODE, RANK))
        assert torch.allclose(once.rows, often.rows, rtol=0, atol=1e-12), "rows differ"
    weights = [exact[way].tables["item"].weight for way in WAYS]
    assert torch.allclose(*weights, rtol=0, atol=1e-12), "tables differ"
    tables = make_tables(options, torch.float32)
    found: dict[str, Any] = {way: {"cpu": [], "wall": [], "rows": [], "wire": []} for way in WAYS}
    number = 0
    for _ in range(options.rounds):
        for way in WAYS:
            dist.barrier()
            wire = own_wire() if options.namespaces else (0, 0)
            began, spent = time.perf_counter(), time.process_time()
            for rows in batches:
                number += 1
                lookup = step(tables[way], rows, number)
                found[way]["rows"].append(between_nodes(lookup, rank, shape))
            found[way]["cpu"].append((time.process_time() - spent) / len(batches))
            found[way]["wall"].append((time.perf_counter() - began) / len(batches))
            dist.barrier()
            now = own_wire() if options.namespaces else (0, 0)
            found[way]["wire"].append((now[0] - wire[0]) / len(batches))
    return found


def summary(
    shape: Shape, way: str, ranks: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Of a step: means over the ranks, then median and range over the rounds."""
    cpu, wall = (np.array([one[way][name] for one in ranks]).mean(0) for name in ("cpu", "wall"))
    rows = float(np.mean([one[way]["rows"] for one in ranks]))
    # Every rank of a node has read the counters of the whole node.
    wire = float(np.mean([one[way]["wire"] for one in ranks])) / shape.local
    return {
        "shape": str(shape),
        "way": way,
        "messages": messages(shape, way),
        "rows_between": rows,
        "bytes_between": rows * (8 + 2 * 4 * options.dim),
        "wire_bytes_sent": wire,
        "cpu_ms": 1e3 * statistics.median(cpu),
        "cpu_range_ms": [1e3 * float(cpu.min()), 1e3 * float(cpu.max())],
        "wall_ms": 1e3 * statistics.median(wall),
        "wall_range_ms": [1e3 * float(wall.min()), 1e3 * float(wall.max())],
    }


def counted(shape: Shape, *, rows: int, ids: int, negatives: int) -> dict[str, Any]:
    """Rows a rank gets from other nodes of a large cluster, drawn, and what the simulator expects.

    All of them, and those that the next global batch needs, too: what is left exposed by prioritized communication.
    """
    rng = np.random.default_rng(shape.nodes)

    def drawn(ranks: int) -> np.ndarray[Any, Any]:
        popular, others = zipf_ids(rng, rows, ranks * ids), rng.integers(0, rows, ranks * negatives)
        return np.unique(np.concatenate([popular, others]))

    asked = [drawn(1) for _ in range(shape.local)]
    of_node, following = np.unique(np.concatenate(asked)), drawn(shape.ranks)
    shared = [np.intersect1d(each, following, assume_unique=True) for each in (*asked, of_node)]
    away = (shape.nodes - 1) / shape.nodes  # owners of rows are as likely on any node
    model = IdModel(rows, 1.0, negatives / (ids + negatives))
    draws = np.array([float(ids + negatives), float(shape.local * (ids + negatives))])

    def by_way(of_rank: float, of_all: float) -> dict[str, float]:
        return {RANK: of_rank * away, NODE: of_all / shape.local * away}

    *shared_of_ranks, shared_of_node = map(len, shared)
    return {
        "shape": str(shape),
        "ids": ids,
        "negatives": negatives,
        "rows_between": by_way(float(np.mean([len(each) for each in asked])), len(of_node)),
        "shared_between": by_way(float(np.mean(shared_of_ranks)), shared_of_node),
        "expected": by_way(*map(float, model.distinct(draws))),
        "expected_shared": by_way(*map(float, model.shared(draws, shape.ranks * (ids + negatives)))),
        "messages": {way: messages(shape, way) for way in WAYS},
    }


def main() -> None:
    """Measure and count all shapes, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="2x2,2x4,4x4", help="nodes x ranks of a node; empty: none")
    parser.add_argument("--counted", default="32x8,128x8", help="shapes whose ids are drawn, without ranks")
    parser.add_argument("--ids", type=int, default=4000, help="of a rank and step")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batches", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--namespaces", action="store_true", help="nodes are network namespaces")
    parser.add_argument(
        "--rate-mbit", type=float, default=None, help="what a node can send, with --namespaces"
    )
    options = parser.parse_args()
    check_namespaces(options)
    rows: list[dict[str, Any]] = []
    for shape in shapes_of(options.shapes):
        ranks = run(measure, shape, options, rate_mbit=options.rate_mbit)
        both = [summary(shape, way, ranks, options) for way in WAYS]
        rows += both
        for row in both:
            ratio = {
                name: row[name] / max(both[0][name], 1e-12)
                for name in ("bytes_between", "wire_bytes_sent", "cpu_ms", "wall_ms")
            }
            wire = f" wire {row['wire_bytes_sent'] / 1e3:8.1f} KB ({ratio['wire_bytes_sent']:.2f})"
            print(
                f"{row['shape']:8} {row['way']:12} messages {row['messages']:3} rows {row['rows_between']:8.1f} "
                f"bytes {row['bytes_between'] / 1e3:8.1f} KB ({ratio['bytes_between']:.2f})"
                f"{wire if options.namespaces else ''} CPU {row['cpu_ms']:6.2f} ms ({row['cpu_range_ms'][0]:.2f} to "
                f"{row['cpu_range_ms'][1]:.2f}; {ratio['cpu_ms']:.2f}) wall {row['wall_ms']:6.2f} ms "
                f"({row['wall_range_ms'][0]:.2f} to {row['wall_range_ms'][1]:.2f}; {ratio['wall_ms']:.2f})",
                flush=True,
            )
    large = []
    for shape in shapes_of(options.counted):
        for negatives in (0, 4096):
            found = counted(shape, rows=100_000_000, ids=26_700, negatives=negatives)
            large.append(found)
            between = found["messages"]
            print(f"{found['shape']:8} {negatives:5,} negatives: messages {between[RANK]} -> {between[NODE]}")
            for what, names in (
                ("all rows", ("rows_between", "expected")),
                ("overlapped", ("shared_between", "expected_shared")),
            ):
                each, expected = (found[name] for name in names)
                print(
                    f"    {what:10} {each[RANK]:8,.0f} -> {each[NODE]:8,.0f} ({each[NODE] / each[RANK]:.2f}); the "
                    f"simulator expects {expected[RANK]:8,.0f} -> {expected[NODE]:8,.0f}",
                    flush=True,
                )
    told = {"benchmark": "rows_once_a_node", "machine": platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({**told, "options": vars(options), "rows": rows, "counted": large}))


if __name__ == "__main__":
    main()
