"""Prioritized embedding communication (PEC): bytes and time during which ranks stand still.

1. Check: plain, prioritized and split training end with the same bits (row-wise Adagrad, on this benchmark's ranks).
2. Bytes a step that travel while the ranks stand still, over all ranks, for rows of 64 float32 numbers. `plain` sends
   every occurrence of an id, `PEC` the occurrences of overlapping rows: both are counted from the ids, since FreeScale
   always removes duplicates. `plain + dedup` and `PEC + dedup` are what FreeScale's two paths have moved and counted.
3. Time of a step over an emulated link (`comm/transports/throttled.py`): bytes really travel, the link's time is slept.
   Forward and backward are sleep, too, so that a busy machine disturbs little; looking up, splitting, summing and
   updating rows is real work. `compute` is the same step without rows. `split` is prioritized with the second half of
   the backward, the gradients of weights, after the rows' gradients have left (pipeline.postpone). Rounds of all ways
   alternate.

    python benchmarks/prioritized_overlap.py [--ranks 2] [--events 1000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.comm import exchange_counts
from freescale.comm.traffic.priority import Channels
from freescale.comm.transport import Transport
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.comm.transports.throttled import Link, ThrottledTransport
from freescale.embedding import DirectMap, RowwiseAdagrad
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.pipeline.prioritized.pipeline import PrioritizedPipeline

WIDTH, ID_BYTES = 64, 8
ROW_BYTES = 4 * WIDTH
ROUND_STEPS, WARM = 14, 4
# The emulated links are hundreds of times slower than those of a cluster, so chunks are smaller, too.
CHUNK_MB = 1 / 32


class ZipfBatches:
    """Rows of every rank's batch, from (seed, step, rank) alone; popular ids lie scattered over the ranks."""

    def __init__(self, *, rows: int, exponent: float, events: int, num_ranks: int) -> None:
        weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(weights)
        self._map = DirectMap(rows)
        self._events, self._num_ranks = events // num_ranks, num_ranks

    def rows(self, step: int, rank: int) -> torch.Tensor:
        """One rank's rows, with repeats."""
        draws = np.random.default_rng([step, rank]).random(self._events) * self._cumulative[-1]
        ids = np.minimum(np.searchsorted(self._cumulative, draws), len(self._cumulative) - 1)
        return self._map.rows(torch.from_numpy(ids))


def make_table(rows: int, dim: int, transport: Transport) -> ShardedEmbedding:
    spec = TableSpec(name="item", num_rows=rows, dim=dim, optimizer=RowwiseAdagrad())
    return ShardedEmbedding([spec], group=dist.group.WORLD, transport=transport)


def make_lanes(link: Link | None) -> tuple[Transport, Channels]:
    """The transport of the plain path and the lanes of the prioritized one, behind one link."""
    made: list[Transport] = []
    for _ in range(3):
        transport: Transport = SocketTransport(dist.group.WORLD)
        exchange_counts(transport, torch.zeros(transport.num_ranks, dtype=torch.int64))
        made.append(transport if link is None else ThrottledTransport(transport, link))
    return made[0], Channels(express=made[1], bulk=made[2], ids=made[2])


def train(
    table: ShardedEmbedding,
    batches: list[torch.Tensor],
    *,
    channels: Channels | None,
    compute_s: float = 0.0,
    split: bool = False,
) -> Iterator[tuple[float, Any]]:
    """(seconds, traffic) of every step, prioritized where lanes are given.

    A third of the compute is the forward, and one the gradients of weights, which come last where they are split off.
    """
    pipeline = PrioritizedPipeline(
        iter(batches),
        embedding=table,
        rows_of=lambda rows: {"item": rows},
        prioritized=lambda step: channels is not None,
        chunk_mb=CHUNK_MB,
        beside=split,
        channels=channels or Channels(express=table.transport, bulk=table.transport, ids=table.transport),
    )
    with pipeline:
        last = time.perf_counter()
        for ready in pipeline:
            time.sleep(compute_s / 3)
            rows = ready.lookups["item"].rows
            rows.grad = 0.01 * rows.detach() + 0.001
            time.sleep((1 if split else 2) * compute_s / 3)
            pipeline.update(ready, lr=0.05)
            if split:
                time.sleep(compute_s / 3)
            now = time.perf_counter()
            yield now - last, ready.traffic
            last = now


def check(rank: int, num_ranks: int) -> bool:
    """All ways on the same batches: the same bits in every table row and its state?"""
    made = ZipfBatches(rows=5000, exponent=1.0, events=4000 * num_ranks, num_ranks=num_ranks)
    batches = [made.rows(step, rank) for step in range(25)]
    transport, channels = make_lanes(None)
    tables = [make_table(5000, 16, transport) for _ in range(3)]
    for table, (way, split) in zip(tables, ((None, False), (channels, False), (channels, True))):
        list(train(table, batches, channels=way, split=split))
    plain, *others = (table.tables["item"] for table in tables)
    return all(
        torch.equal(plain.weight, ours.weight)
        and torch.equal(plain.state["square_sum"], ours.state["square_sum"])
        for ours in others
    )


def count_bytes(rank: int, num_ranks: int, *, rows: int, exponent: float, events: int) -> dict[str, float]:
    """Exposed bytes of one step by way, of this rank; rows are counted on a narrow table and priced at WIDTH."""
    made = ZipfBatches(rows=rows, exponent=exponent, events=events, num_ranks=num_ranks)
    batches = [made.rows(step, rank) for step in range(4)]
    transport, channels = make_lanes(None)
    moved = {}
    for way, used in (("plain + dedup", None), ("PEC + dedup", channels)):
        table = make_table(rows, 1, transport)
        traffic = [each for _, each in train(table, batches, channels=used)][2]
        narrow = 2 * 4 + (0 if used else ID_BYTES)
        wide = 2 * ROW_BYTES + (0 if used else ID_BYTES)
        # Sent and received are both counted: halve it to get bytes that cross the wire once over all ranks.
        moved[way] = traffic.exposed_bytes / narrow * wide / 2
    before = torch.cat([made.rows(1, other) for other in range(num_ranks)]).unique()
    after = torch.cat([made.rows(3, other) for other in range(num_ranks)]).unique()
    mine = batches[2]
    first, count = table.plans["item"].block(rank)
    away = mine[(mine < first) | (mine >= first + count)]
    moved["plain"] = float(len(away) * (2 * ROW_BYTES + ID_BYTES))
    late, urgent = (int(torch.isin(away, other).sum()) for other in (before, after))
    moved["PEC"] = float((late + urgent) * ROW_BYTES)
    return moved


def measure_time(
    rank: int,
    num_ranks: int,
    *,
    link: Link | None,
    rows: int,
    exponent: float,
    events: int,
    compute_s: float,
    rounds: int,
) -> dict[str, list[float]]:
    """Median step time in ms of every round, by way."""
    made = ZipfBatches(rows=rows, exponent=exponent, events=events, num_ranks=num_ranks)
    transport, channels = make_lanes(link)
    table = make_table(rows, WIDTH, transport)
    times: dict[str, list[float]] = {"compute": [], "plain": [], "prioritized": [], "split": []}
    for round_ in range(rounds):
        first = round_ * ROUND_STEPS
        batches = [made.rows(step, rank) for step in range(first, first + ROUND_STEPS)]
        for way, used in (("plain", None), ("prioritized", channels), ("split", channels)):
            dist.barrier()
            split = way == "split"
            steps = train(table, batches, channels=used, compute_s=compute_s, split=split)
            seconds = [each for each, _ in steps]
            times[way].append(1000 * median(seconds[WARM:-1]))
        began = time.perf_counter()
        for _ in range(ROUND_STEPS):
            time.sleep(compute_s / 3)
            time.sleep(2 * compute_s / 3)
        times["compute"].append(1000 * (time.perf_counter() - began) / ROUND_STEPS)
    return times


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    result: dict[str, Any] = {"check": check(rank, options.ranks), "bytes": {}, "time": {}}
    for rows in options.rows:
        for exponent in (1.0, 0.8):
            key = f"{rows // 1_000_000}M rows, Zipf {exponent}"
            result["bytes"][key] = count_bytes(
                rank, options.ranks, rows=rows, exponent=exponent, events=options.events
            )
    size = {"rows": options.time_rows, "exponent": 1.0, "events": options.time_events}
    for speed in options.gb_per_s:
        link = Link(gb_per_s=speed, latency_us=options.latency_us) if speed else None
        result["time"][f"{speed} GB/s" if speed else "no link emulated"] = measure_time(
            rank,
            options.ranks,
            link=link,
            **size,
            compute_s=options.compute_ms / 1000,
            rounds=options.rounds,
        )
    everybody: list[Any] = [None] * options.ranks
    dist.all_gather_object(everybody, result)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(everybody))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(r, folder, options)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return json.loads(Path(folder, "results.json").read_text())


def print_bytes(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    ways = ("plain", "plain + dedup", "PEC", "PEC + dedup")
    print(f"\nExposed MB a step over all ranks, rows of {WIDTH} float32 (share of plain)")
    print(f"{'':24}" + "".join(f"{way:>20}" for way in ways))
    table = {}
    for key in results[0]["bytes"]:
        totals = {way: sum(rank["bytes"][key][way] for rank in results) for way in ways}
        shares = {way: total / totals["plain"] for way, total in totals.items()}
        cells = (f"{totals[way] / 1e6:11.1f} ({100 * shares[way]:5.1f}%)" for way in ways)
        print(f"{key:24}" + "".join(f"{cell:>20}" for cell in cells))
        table[key] = {way: round(share, 4) for way, share in shares.items()}
    return table


def _adds_by_round(times: dict[str, list[float]], way: str) -> list[float]:
    """What a way adds to the compute, within every round."""
    return [ours / alone - 1 for ours, alone in zip(times[way], times["compute"], strict=True)]


def print_times(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    ways = ("plain", "prioritized", "split")
    print(f"\n{'step time, ms':24}{'compute':>10}" + "".join(f"{way:>13}{'adds':>8}" for way in ways))
    table = {}
    for key in results[0]["time"]:
        ms = {way: median(results[0]["time"][key][way]) for way in ("compute", *ways)}
        adds = {way: ms[way] / ms["compute"] - 1 for way in ways}
        cells = "".join(f"{ms[way]:13.1f}{100 * adds[way]:7.1f}%" for way in ways)
        print(f"{key:24}{ms['compute']:10.1f}{cells}")
        shares = {way: _adds_by_round(results[0]["time"][key], way) for way in ways}
        ranges = "".join(
            f"{'':5}{f'{100 * min(one):.1f} to {100 * max(one):.1f}%':>16}" for one in shares.values()
        )
        print(f"{'  adds, by round':34}{ranges}")
        table[key] = {name: round(value, 2) for name, value in ms.items()}
        table[key] |= {f"{way}_adds": round(share, 4) for way, share in adds.items()}
        table[key] |= {
            f"{way}_adds_by_round": [round(each, 4) for each in one] for way, one in shares.items()
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000], help="for the bytes")
    parser.add_argument("--events", type=int, default=1_000_000, help="of a global batch, for the bytes")
    parser.add_argument("--time-rows", type=int, default=10_000_000)
    parser.add_argument("--time-events", type=int, default=20_000)
    parser.add_argument(
        "--gb-per-s", type=float, nargs="*", default=[0, 0.05, 0.03, 0.02], help="0: no link emulated"
    )
    parser.add_argument("--latency-us", type=float, default=50.0)
    parser.add_argument("--compute-ms", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = on_ranks(options)
    if not all(rank["check"] for rank in results):
        raise SystemExit("FAILED: plain and prioritized training differ; no number is printed")
    print(f"check: the same bits all ways on {options.ranks} ranks")
    summary = {
        "check": True,
        "ranks": options.ranks,
        "exposed_share": print_bytes(results),
        "time": print_times(results),
        "settings": dict(vars(options)),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
