"""Which kernels of ranks that share a GPU run outside of all that their accounts call compute, by name.

Ranks train as in `idle_truth.py --only virtual`; each watch of their accounts, twelve steps, is written down: what ran
outside of spans of work, microseconds a step. What is no transfer and long belongs into a span, or is communication
(`trace/profiler_trace.py` tells kernels apart).

    python benchmarks/outside_compute.py [--out DIR]     # four virtual GPUs; DIR/RANK.txt has every watch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import idle_truth

from freescale.comm.world import as_rank
from freescale.trace import WORK, Activity, Interval, Span, StepNotes, overlap, union, without
from freescale.train.accounts import kernel_watch
from freescale.train.accounts.busy_meter import BusyMeter

OUT = "FREESCALE_OUTSIDE"
SHOWN = 14
seen: list[Activity] = []


def remember(found: Any) -> Any:
    """What a watch reads, kept until its steps are known."""

    def read(profiler: Any) -> list[Activity]:
        seen[:] = found(profiler)
        return list(seen)

    return read


def write_down(close: Any) -> Any:
    """What ran outside of spans, behind each watch."""

    def closing(
        meter: BusyMeter,
        step: int,
        ended: Sequence[tuple[int, float, float]],
        spans: Sequence[Span],
        notes: Sequence[StepNotes],
    ) -> None:
        opened = meter._opens
        close(meter, step, ended, spans, notes)
        steps = [one for one in ended if opened < one[0] <= step]
        anchors = [one for one in seen if kernel_watch._ANCHOR in one.name]
        if steps and anchors:
            watch: Any = meter.watch
            offset = watch._clock.read(watch._behind) - anchors[0].end
            kernels = [
                one._replace(start=one.start + offset, end=one.end + offset)
                for one in seen
                if one is not anchors[0]
            ]
            text = told(kernels, spans, steps[0][1], steps[-1][2], len(steps))
            with (Path(os.environ[OUT]) / f"{os.environ.get('RANK', '0')}.txt").open("a") as file:
                file.write(text)

    return closing


def told(kernels: Sequence[Activity], spans: Sequence[Span], start: float, end: float, steps: int) -> str:
    """A line on the whole, and one for each of the longest."""
    near = [one for one in kernels if start <= one.start < end]
    work = union((span.start, span.end) for span in spans if span.kind in WORK)
    computed = union((one.start, one.end) for one in near if one.kind == "compute")
    facts = {
        "steps": steps,
        "ms_a_step": 1000 * (end - start) / steps,
        "kernels_ms": 1000 * length(computed) / steps,
        "outside_ms": 1000 * length(without(computed, work)) / steps,
        "inside_ms": 1000 * length(overlap(computed, work)) / steps,
    }
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in near:
        if (left := length(without([(one.start, one.end)], work))) > 0:
            by_name[f"{one.kind} {one.name[:60]}"].append(left)
    longest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:SHOWN]
    rows = [
        f"   {1e6 * sum(each) / steps:7.1f} us {len(each) / steps:5.1f}x {name}" for name, each in longest
    ]
    return "\n".join([json.dumps(facts), *rows, ""])


def length(intervals: Sequence[Interval]) -> float:
    return sum(high - low for low, high in intervals)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=tempfile.mkdtemp())
    out = Path(parser.parse_args().out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ[OUT] = str(out)
    idle_truth.__file__ = __file__  # ranks run this file
    sys.argv = [__file__, "--only", "virtual", "--rounds", "1"]
    try:
        idle_truth.main()
    finally:
        for path in sorted(out.glob("*.txt")):
            print(path.name, path.read_text(), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    kernel_watch.in_memory = remember(kernel_watch.in_memory)
    BusyMeter.close = write_down(BusyMeter.close)  # type: ignore[method-assign]
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        as_rank(lambda: idle_truth.on_rank(json.loads(sys.argv[1])))
    else:
        main()
