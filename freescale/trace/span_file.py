"""One file of spans a rank, small however long the run: RUN_DIR/spans/rank-00000.jsonl.

The first line of every start of a run is a header; after it stand the steps that are kept, each followed by its spans.
Times are seconds since the first header's origin, on the clock of rank 0. Kept are blocks of successive steps: all at
first, later ever fewer, so that a run of a million steps leaves some megabytes.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freescale.trace.bubbles import Parts
from freescale.trace.spans import Arrival, Span

FOLDER = "spans"
BLOCK = 4
"""Steps kept in a row: enough to see a step begin and end, and what its neighbours do."""

ALL_BLOCKS = 64
FORMAT = 1


def is_kept(step: int) -> bool:
    """Whether the spans of a step are written: all blocks at first, then every 2nd, every 4th and so on."""
    block = (step - 1) // BLOCK
    stride = 1
    while block >= ALL_BLOCKS * stride:
        stride *= 2
    return block % stride == 0


class SpanWriter:
    """Appends the kept steps of one rank to its file.

    Args:
        run_dir: the run's folder.
        rank: this rank.
        num_ranks: all of them.
        origin: time zero, in seconds of rank 0's clock, the same on every rank.
        facts: more for the header: host, device.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        num_ranks: int,
        origin: float,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._origin = origin
        self._path = folder / file_name(rank)
        self._file = self._path.open("a", encoding="utf-8")
        header = {"format": FORMAT, "rank": rank, "num_ranks": num_ranks, **(facts or {})}
        self._file.write(json.dumps({"header": header}) + "\n")

    def __getstate__(self) -> tuple[float, Path]:
        self._file.flush()  # another process goes on after what is written here
        return self._origin, self._path.resolve()

    def __setstate__(self, state: tuple[float, Path]) -> None:
        self._origin, self._path = state
        self._file = self._path.open("a", encoding="utf-8")

    def write(
        self,
        step: int,
        start: float,
        end: float,
        parts: Parts,
        spans: Iterable[Span],
        *,
        offset: float,
        cpu: float | None = None,
    ) -> None:
        """One step and its spans; `offset` brings this rank's clock to that of rank 0.

        `cpu` is the CPU time the step took, which, unlike the time between two moments, other programs do not lengthen.
        """
        zero = self._origin - offset
        seconds = (parts.compute, parts.straggler, parts.comm)
        more = "" if cpu is None else f',"cpu":{cpu:.7f}'
        lines = [
            f'{{"step":{step},"start":{start - zero:.7f},"end":{end - zero:.7f},'
            f'"parts":[{",".join(f"{value:.7f}" for value in seconds)}]{more}}}\n'
        ]
        for span in spans:
            if span.end > start and span.start < end and span.kind != "handover":
                lines.append(_line(span, zero))
        self._file.write("".join(lines))

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """No step follows."""
        self._file.close()


@dataclass(frozen=True)
class KeptStep:
    """One step of one rank as its file tells it."""

    step: int
    start: float
    end: float
    parts: Parts
    spans: list[Span] = field(default_factory=list)
    cpu: float | None = None


@dataclass(frozen=True)
class RankSpans:
    """The last start of a run as one rank recorded it."""

    rank: int
    header: Mapping[str, Any]
    steps: dict[int, KeptStep]


@dataclass(frozen=True)
class RunSpans:
    """What the span files of a run hold; `problems` says in plain words what they lack."""

    ranks: list[RankSpans] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def file_name(rank: int) -> str:
    """The file of a rank, in an order that sorts."""
    return f"rank-{rank:05}.jsonl"


def read_spans(run_dir: Path) -> RunSpans:
    """Everything readable under RUN_DIR/spans; files that are missing, cut or garbled become `problems`."""
    folder = run_dir / FOLDER
    files = sorted(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
    if not files:
        return RunSpans()
    problems: list[str] = []
    read = [one for path in files if (one := _read_rank(path, problems)) is not None]
    # A run resumed on fewer ranks leaves files of ranks that are no more.
    num_ranks = _number(read[0].header.get("num_ranks")) if read else 0
    ranks = [one for one in read if one.rank < num_ranks]
    missing = sorted(set(range(num_ranks)) - {one.rank for one in ranks})
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        problems.append(f"Spans of {len(missing)} of {num_ranks} ranks are missing: {shown}.")
    problems.extend(_skewed(ranks))
    return RunSpans(ranks, problems)


def common_steps(ranks: Sequence[RankSpans]) -> list[int]:
    """Steps every rank has kept, in order."""
    if not ranks:
        return []
    return sorted(set.intersection(*(set(one.steps) for one in ranks)))


_quoted = functools.cache(json.dumps)
"""Of names, of which there are few: quoting one takes longer than all the rest of a line."""


def _line(span: Span, zero: float) -> str:
    more = ""
    if span.arrival is not None:
        more = f',"arrived":{span.arrival.mark - zero:.7f}'
        more += "" if span.last is None else f',"last":{span.last - zero:.7f}'
        if span.missing is not None:
            pairs = (f"[{low - zero:.7f},{high - zero:.7f}]" for low, high in span.missing)
            more += f',"missing":[{",".join(pairs)}]'
    kind = "compute" if span.kind == "replay" else span.kind  # for readers, one is as good as the other
    return (
        f'{{"name":{_quoted(span.name)},"kind":"{kind}","lane":{_quoted(span.lane)},'
        f'"of":{span.step},"from":{span.start - zero:.7f},"to":{span.end - zero:.7f}{more}}}\n'
    )


def _read_rank(path: Path, problems: list[str]) -> RankSpans | None:
    header: Mapping[str, Any] = {}
    steps: dict[int, KeptStep] = {}
    current: KeptStep | None = None
    bad = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
                if "header" in entry:
                    # Monotonic clocks do not outlive a restart: only the last start of a run is one timeline.
                    header, steps, current = dict(entry["header"]), {}, None
                elif "step" in entry:
                    current = _step(entry)
                    steps[current.step] = current
                elif current is not None:
                    current.spans.append(_span(entry))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                bad += 1
    name = f"{FOLDER}/{path.name}"
    if bad:
        problems.append(
            f"{bad} {'lines' if bad > 1 else 'line'} of {name} could not be read: cut or garbled."
        )
    matched = re.fullmatch(r"rank-(\d+)\.jsonl", path.name)
    if matched is None or _number(header.get("num_ranks")) < 1:
        problems.append(f"{name} has no header and is left out.")
        return None
    return RankSpans(int(matched[1]), header, steps)


def _step(entry: Mapping[str, Any]) -> KeptStep:
    start, end = float(entry["start"]), float(entry["end"])
    compute, straggler, comm = (float(value) for value in entry["parts"])
    cpu = float(entry["cpu"]) if "cpu" in entry else None
    return KeptStep(int(entry["step"]), start, end, Parts(end - start, compute, straggler, comm), cpu=cpu)


def _span(entry: Mapping[str, Any]) -> Span:
    arrival = None
    if "arrived" in entry:
        arrival = Arrival(str(entry["name"]), int(entry["of"]), float(entry["arrived"]), 0)
    return Span(
        str(entry["name"]),
        str(entry["kind"]),
        str(entry["lane"]),
        int(entry["of"]),
        float(entry["from"]),
        float(entry["to"]),
        arrival,
        float(entry["last"]) if "last" in entry else None,
        tuple((float(low), float(high)) for low, high in entry["missing"]) if "missing" in entry else None,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


SKEW_S = 0.002


def _skewed(ranks: Sequence[RankSpans]) -> list[str]:
    """Ranks whose steps end at another time than everybody's: all leave the same exchanges, so clocks differ."""
    steps = common_steps(ranks)
    if len(ranks) < 2 or not steps:
        return []
    said = []
    for one in ranks[1:]:
        differences = sorted(one.steps[step].end - ranks[0].steps[step].end for step in steps)
        typical = differences[len(differences) // 2]
        length = sorted(ranks[0].steps[step].parts.total for step in steps)[len(steps) // 2]
        if abs(typical) > max(SKEW_S, 0.5 * length):
            said.append(
                f"The clock of rank {one.rank} seems to be {1000 * typical:+,.1f} ms off that of rank 0: "
                "its row of the timeline is shifted, and straggler and comm may be taken for each other."
            )
    return said


def remove(run_dir: Path) -> None:
    """Forget the spans of an earlier run in this folder."""
    folder = run_dir / FOLDER
    for path in folder.glob("rank-*.jsonl") if folder.is_dir() else ():
        os.unlink(path)
