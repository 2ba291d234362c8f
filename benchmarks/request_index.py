"""Memory of the index of requests: held by every process, and in files that all processes of a machine share.

    PYTHONPATH=. python benchmarks/request_index.py [--users 1000] [--processes 4]

Anchors of the made-up log of DLRMv4 with histories of full length, as `data.source=columns` keeps it. In each way so
many processes, at the same time, find the training requests and make the sampler that plans steps over them, in the
order of the benchmark. Told is what a process has of its own afterwards and at its peak (pages of no file, by the
kernel's count), and what all of them have together with shared pages counted once (Pss). Code is loaded and planning
warmed up before. The ways are checked to hold the same requests and steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from freescale.balance import BalancedSampler
from freescale.data import AnchorRule, PoolRule, RequestExamples
from freescale.data.requests.request_index import index_of_anchors
from freescale.data.sources.columns import ColumnSource
from freescale.data.sources.dlrmv4_twin import TwinSource

WAYS = ("every process", "shared files")
FULL = 2_290_835_423
"""Training anchors of the benchmark itself."""


class DigestedTwin(TwinSource):
    """The twin, which says what it holds as a prepared data set does."""

    def digests(self) -> dict[str, str]:
        """It follows from its seed and size."""
        return {"twin": f"{self.world.seed} {self.world.num_users}"}


def memory(kind: str) -> int:
    """Bytes of this process by the kernel's count: pages of no file, or its share of all pages."""
    said = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(said["Anonymous" if kind == "own" else "Pss"].split()[0])


class Peak(threading.Thread):
    """The largest private memory while something runs, looked at every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._over = 0, threading.Event()

    def run(self) -> None:
        """Look until told to end."""
        while not self._over.wait(0.02):
            self.most = max(self.most, memory("own"))

    def end(self) -> int:
        """What was found."""
        self._over.set()
        self.join()
        return max(self.most, memory("own"))


def process(way: str, folder: str, users: int) -> None:
    """One process: its requests, its sampler; told as JSON on a line, twice."""
    source = ColumnSource(DigestedTwin(num_users=users, seed=1), folder)
    rule = AnchorRule("listened", 4086, 1)
    examples = RequestExamples(
        source=source,
        outcomes=("listened",),
        max_length=4087,
        anchors=rule,
        pools=PoolRule("action", (1, 2, 4), 1362, 20_000),
    )
    warm = BalancedSampler(np.arange(1, 30_000), global_batch=8192, num_ranks=8, rank=0, shuffle=False)
    warm.plan(0)
    source.pools(examples.pools)
    before, began = memory("own"), time.process_time()
    peak = Peak()
    peak.start()
    if way == WAYS[0]:
        examples.__dict__["index"] = index_of_anchors(source, "train", rule)
    sampler = BalancedSampler(
        examples.lengths(), global_batch=8192, num_ranks=8, rank=0, groups=examples.groups, shuffle=False
    )
    steps = sampler.batches.steps_in_epoch(0)
    hashes = [sampler.plan(step).plan_hash for step in (0, steps // 2, steps - 1)]
    index = examples.index
    digest = hashlib.blake2b(digest_size=8)
    part = 1 << 16
    most = peak.end() - before
    for at in range(0, len(index.user), part):
        for values in (index.user, index.start, examples.lengths()):
            digest.update(np.asarray(values[at : at + part], np.int64).tobytes())
    own = memory("own") - before
    print(
        json.dumps(
            {
                "requests": len(index.user),
                "own": own,
                "peak": most,
                "cpu_s": time.process_time() - began,
                "same": [digest.hexdigest(), hashes],
            }
        ),
        flush=True,
    )
    sys.stdin.readline()  # all others are there now
    print(json.dumps({"share": memory("share")}), flush=True)
    sys.stdin.readline()


def together(way: str, folder: str, *, users: int, processes: int) -> dict[str, Any]:
    """So many processes at once."""
    command = [sys.executable, __file__, "--process", way, "--folder", folder, "--users", str(users)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    told = [json.loads(each.stdout.readline()) for each in running if each.stdout is not None]
    shares = []
    for each in running:
        assert each.stdin is not None
        assert each.stdout is not None
        each.stdin.write("\n")
        each.stdin.flush()
        shares.append(json.loads(each.stdout.readline())["share"])
    for each in running:
        each.communicate("\n")
    return {
        "requests": told[0]["requests"],
        "own": max(each["own"] for each in told),
        "peak": max(each["peak"] for each in told),
        "cpu_s": [each["cpu_s"] for each in told],
        "share": sum(shares),
        "same": {json.dumps(each["same"]) for each in told},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--users", type=int, default=1000, help="listeners; 1000 have 2.3 M training requests"
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--process", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        process(options.process, options.folder, options.users)
        return
    with tempfile.TemporaryDirectory() as folder:
        ColumnSource(DigestedTwin(num_users=options.users, seed=1), folder)
        rows = {
            name: together(way, folder, users=options.users, processes=options.processes)
            for name, way in (
                (WAYS[0], WAYS[0]),
                (f"{WAYS[1]}, made first", WAYS[1]),
                (WAYS[1], WAYS[1]),
            )
        }
        size = sum(path.stat().st_size for path in (Path(folder) / "requests").rglob("*") if path.is_file())
    same = set.union(*(row.pop("same") for row in rows.values()))
    assert len(same) == 1, "the two ways hold other requests"
    count = next(iter(rows.values()))["requests"]
    print(f"{count:,} requests, {options.processes} processes; files of {size / count:.1f} bytes a request")
    print(f"{'':28} {'own, bytes':>11} {'peak, bytes':>12} {'own at full size':>17} {'CPU s of each':>24}")
    for name, row in rows.items():
        each = row["own"] / count
        cpu = " ".join(f"{one:.1f}" for one in row["cpu_s"])
        print(f"{name:28} {each:11.1f} {row['peak'] / count:12.1f} {each * FULL / 1e9:14.1f} GB {cpu:>24}")
    print("bytes are those of a request and process; full size: 2.29 billion requests")
    print(json.dumps({"requests": count, "bytes_in_files": size, "ways": rows}))


if __name__ == "__main__":
    main()
