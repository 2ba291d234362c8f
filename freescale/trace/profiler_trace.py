"""Reads traces of the torch profiler, of any program: kernels, transfers, collectives and steps of each rank.

Reads what `torch.profiler` exports (Chrome trace JSON, also gzipped), one file a rank. The kernel of a collective
starts when its rank is ready and spins until the last one is: the latest start among the ranks tells waiting from
transfer.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from freescale.errors import DataError

COLLECTIVE = re.compile(
    r"nccl|rccl|nvshmem|symm_mem|multimem|one_shot_all|two_shot_all|cross_device_reduce|^sum_parts_kernel$",
    re.I,
)
"""Names of kernels that move data between ranks; whatever is no transfer and not among them is compute.

The last one is our own: it adds up what has come from all ranks (`comm/traffic/deterministic_all_reduce.py`).
"""

_COPY = re.compile(r"^copy_pieces_\d+$")
"""Our own kernel that copies between ranks of one GPU (`comm/rings/copies_inside.py`): a transfer like the driver's."""

CPU_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):")
_CALLS_ONE = re.compile(r"^c10d::|^record_param_comms$")
"""Operators that only hand a collective to its thread: neither work nor a wait."""

_STEP = re.compile(r"ProfilerStep#(\d+)")
_MEMORY = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_DEVICE = _MEMORY | {"kernel"}
_ENDS_TOGETHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|barrier", re.I)


class Activity(NamedTuple):
    """Something a device (or, without one, the CPU) did. Times in seconds of the rank's clock.

    Args:
        kind: "compute", "memory" or "collective".
        name: of the kernel or operator.
        start: its beginning.
        end: its end.
        group: the ranks a collective runs over, as the trace names them.
        stream: where it ran.
    """

    kind: str
    name: str
    start: float
    end: float
    group: str = ""
    stream: str = ""


@dataclass(frozen=True)
class ProfilerTrace:
    """One rank's trace.

    Args:
        rank: as the trace tells, or the number of the file.
        world_size: ranks of the program, if the trace tells.
        on_device: whether there is any GPU activity; otherwise operators of the CPU are what is counted.
        activities: in order of their start.
        steps: (number, start) of each profiler step.
        end: of the last of them.
        base_ns: what times count from.
        problems: what could not be read.
    """

    rank: int
    world_size: int | None
    on_device: bool
    activities: list[Activity]
    steps: list[tuple[int, float]]
    end: float
    base_ns: int = 0
    problems: list[str] = field(default_factory=list)


def read_profiler_traces(paths: Sequence[Path]) -> list[ProfilerTrace]:
    """All files, by rank; two files of one rank are refused."""
    traces: list[ProfilerTrace] = []
    for place, path in enumerate(paths):
        base_ns = traces[0].base_ns if traces else None
        traces.append(read_profiler_trace(path, fallback_rank=place, base_ns=base_ns))
    by_rank = {trace.rank: trace for trace in traces}
    if len(by_rank) < len(traces):
        twice = sorted(rank for rank in by_rank if sum(trace.rank == rank for trace in traces) > 1)
        raise DataError(
            "two trace files are of the same rank", got=f"rank {twice[0]} twice", allowed="one file a rank"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def read_profiler_trace(path: Path, *, fallback_rank: int = 0, base_ns: int | None = None) -> ProfilerTrace:
    """One file, times counted from `base_ns` (default: its own); what is cut off at its end is left out and said."""
    content, problems = _load(path)
    base_ns = _whole(content.get("baseTimeNanoseconds")) if base_ns is None else base_ns
    events = [event for event in content.get("traceEvents", []) if isinstance(event, dict)]
    info = content.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    base_us = (_whole(content.get("baseTimeNanoseconds")) - base_ns) / 1000
    complete = [
        {**event, "ts": event["ts"] + base_us} if base_us else event
        for event in events
        if event.get("ph") == "X" and _is_timed(event)
    ]
    device = sorted(filter(None, map(_device_activity, complete)), key=lambda one: one.start)
    activities = device or _cpu_activities(complete)
    if not activities:
        raise DataError(
            "the trace holds no GPU kernels and no CPU operators",
            got=path,
            next_step="record with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        )
    steps, end = _steps(complete, on_device=bool(device))
    rank = info.get("rank")
    if not isinstance(rank, int):
        rank = fallback_rank
        problems.append(f"{path.name} does not say which rank it is of: taken as rank {rank}.")
    size = info.get("world_size")
    return ProfilerTrace(
        rank, size if isinstance(size, int) else None, bool(device), activities, steps, end, base_ns, problems
    )


def clock_offsets(traces: Sequence[ProfilerTrace]) -> dict[int, float]:
    """Seconds to add to each rank's times so that the collectives all ranks leave together end together."""
    first = _ends(traces[0])
    offsets = {traces[0].rank: 0.0}
    for trace in traces[1:]:
        mine = _ends(trace)
        gaps = sorted(first[key] - mine[key] for key in first.keys() & mine.keys())
        # Half a millisecond is what ends differ by on one clock; more is another clock.
        middle = gaps[len(gaps) // 2] if gaps else 0.0
        offsets[trace.rank] = middle if abs(middle) > 5e-4 else 0.0
    return offsets


def collective_keys(trace: ProfilerTrace) -> list[tuple[tuple[int, str, int], Activity]]:
    """Each collective under a key that is the same on every rank: step, group, and which one of these."""
    counts: dict[tuple[int, str], int] = {}
    keyed = []
    for one in trace.activities:
        if one.kind != "collective":
            continue
        name = (_step_at(trace, one.start), one.group)
        counts[name] = counts.get(name, 0) + 1
        keyed.append(((*name, counts[name]), one))
    return keyed


def _ends(trace: ProfilerTrace) -> dict[tuple[int, str, int], float]:
    keyed = collective_keys(trace)
    together = [(key, one) for key, one in keyed if _ENDS_TOGETHER.search(one.name)]
    return {key: one.end for key, one in together or keyed}


def _step_at(trace: ProfilerTrace, moment: float) -> int:
    number = -1
    for step, start in trace.steps:
        if start > moment:
            break
        number = step
    return number


def _load(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        text = raw.decode("utf-8", errors="replace")
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"cannot read the trace {path}", got=str(error)) from None
    try:
        content = json.loads(text)
        return (content if isinstance(content, dict) else {"traceEvents": content}), []
    except ValueError:
        return _salvaged(text, path)


def _salvaged(text: str, path: Path) -> tuple[dict[str, Any], list[str]]:
    """The whole events of a file that ends too early: a profiled program that was killed while writing."""
    begin = text.find("[", text.find('"traceEvents"'))
    decoder, events, place = json.JSONDecoder(), [], begin + 1
    while begin >= 0:
        while place < len(text) and text[place] in " \r\n\t,":
            place += 1
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            break
        events.append(event)
    if not events:
        raise DataError(
            "this is not a trace of the torch profiler", got=path, allowed="Chrome trace JSON, plain or .gz"
        )
    rank = re.search(r'"distributedInfo"\s*:\s*(\{[^}]*)', text)
    found = re.search(r'"rank"\s*:\s*(\d+)', rank[1]) if rank else None
    size = re.search(r'"world_size"\s*:\s*(\d+)', rank[1]) if rank else None
    info = {name: int(match[1]) for name, match in (("rank", found), ("world_size", size)) if match}
    said = f"{path.name} is cut off: {len(events):,} whole events were read."
    return {"traceEvents": events, "distributedInfo": info}, [said]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_timed(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("ts"), int | float) and isinstance(event.get("dur"), int | float)


@lru_cache(maxsize=4096)
def _is_collective(name: str) -> bool:
    """A step has few kernels, and long names of them."""
    return COLLECTIVE.search(name) is not None


def activity_of(kind: str, name: str, start: float, end: float) -> Activity | None:
    """What the profiler calls `kind` ("kernel", "gpu_memcpy", ...); None for what no device does."""
    if kind not in _DEVICE:
        return None
    if kind in _MEMORY or _COPY.search(name):
        return Activity("memory", name, start, end)
    return Activity("collective" if _is_collective(name) else "compute", name, start, end)


def _device_activity(event: Mapping[str, Any]) -> Activity | None:
    start = float(event["ts"]) / 1e6
    end = start + float(event["dur"]) / 1e6
    found = activity_of(str(event.get("cat", "")).lower(), str(event.get("name", "")), start, end)
    if found is None:
        return None
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    stream = str(arguments.get("stream", event.get("tid", "")))
    if found.kind != "collective":
        return found._replace(stream=stream)
    named = arguments.get("Process Group Name") or arguments.get("Process Group Description")
    members = arguments.get("Process Group Ranks")
    group = f"{named or 'stream ' + stream} {members or ''}".strip()
    return found._replace(
        name=str(arguments.get("Collective name") or found.name), group=group, stream=stream
    )


def _cpu_activities(events: Iterable[Mapping[str, Any]]) -> list[Activity]:
    """Operators of a program without a GPU; those of collectives are waits, the others work."""
    found = []
    for event in events:
        name, kind = str(event.get("name", "")), str(event.get("cat", "")).lower()
        is_collective = bool(CPU_COLLECTIVE.search(name))
        if (kind != "cpu_op" and not (is_collective and kind == "user_annotation")) or _CALLS_ONE.search(
            name
        ):
            continue
        start = float(event["ts"]) / 1e6
        end = start + float(event["dur"]) / 1e6
        stream = str(event.get("tid", ""))
        group = name if is_collective else ""
        found.append(Activity("collective" if is_collective else "compute", name, start, end, group, stream))
    return sorted(found, key=lambda one: one.start)


def _steps(events: Sequence[Mapping[str, Any]], *, on_device: bool) -> tuple[list[tuple[int, float]], float]:
    """Profiler steps: as the device saw them, or else as the CPU did."""
    for kind in ("gpu_user_annotation", "user_annotation") if on_device else ("user_annotation",):
        found = [
            (int(match[1]), float(event["ts"]) / 1e6, float(event["dur"]) / 1e6)
            for event in events
            if str(event.get("cat", "")).lower() == kind
            and (match := _STEP.search(str(event.get("name", ""))))
        ]
        if found:
            found.sort(key=lambda one: one[1])
            return [(number, start) for number, start, _ in found], max(s + d for _, s, d in found)
    return [], 0.0
