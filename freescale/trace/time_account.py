"""Where the time of a run went, in figures: the headline, rank by rank, and who is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freescale.trace.bubbles import CAUSES, Parts, slowest, total
from freescale.trace.metrics_log import Event, MetricsLog
from freescale.trace.span_file import RunSpans
from freescale.units import number

PARTS = ("compute", *CAUSES)
HOST_BOUND = 0.3
"""A run whose devices wait for their hosts for so much of the time is bound by them."""

WORDS = {
    "compute": "compute",
    "straggler": "waiting for the slowest rank",
    "comm": "exposed communication",
    "host": "host and the rest",
}


@dataclass(frozen=True)
class Account:
    """The time of a run's steps.

    Args:
        num_steps: steps with a breakdown. The first of the run is left out: it compiles kernels and opens
            connections; so are those seen kernel by kernel, which takes time.
        step_ms: mean length of a step.
        shares: compute, straggler, comm, host as shares of the time; they add up to 1.
    """

    num_steps: int
    step_ms: float
    shares: Mapping[str, float]

    @property
    def bubble(self) -> float:
        """The share in which nothing was computed."""
        return sum(self.shares[cause] for cause in CAUSES)


def account_of(steps: Sequence[Event]) -> Account | None:
    """All step lines that have a breakdown, weighted by their length; None if there is none."""
    whole = [(row, event) for event in steps if (row := _row(event)) is not None]
    if len(whole) > 1:
        whole = whole[1:]
    rows = [row for row, event in whole if not event.get("watched")] or [row for row, _ in whole]
    total = sum(ms for ms, _ in rows)
    if not rows or not total > 0:
        return None
    causes = {cause: sum(ms * shares[cause] for ms, shares in rows) / total for cause in CAUSES}
    return Account(len(rows), total / len(rows), {"compute": 1 - sum(causes.values()), **causes})


def rank_parts(log: MetricsLog, spans: RunSpans) -> dict[int, Parts]:
    """Rank -> where its time went: as the run summed it up, or from the kept steps of a run that died before."""
    if log.ranks is not None and (parts := _ranks_event(log.ranks)):
        return dict(enumerate(parts))
    return {one.rank: total(step.parts for step in one.steps.values()) for one in spans.ranks if one.steps}


def lateness(ranks: Mapping[int, Parts], named: Sequence[int] = ()) -> str:
    """One sentence: who is waited for most, how often (`named`: the slowest of each step), and what it does then."""
    order = list(ranks)
    late = slowest([ranks[rank] for rank in order])
    if late is None:
        return ""
    rank = order[late.rank]
    often = Counter(named)[rank] / len(named) if named else 0.0
    doing = {"compute": "computes", "comm": "waits for transfers", "host": "is busy on its host"}[late.cause]
    # Time lost decides, not how often: where the two tell different stories, only the first is told.
    times = f", in {often:.0%} of the steps" if often * len(order) > 1 else ""
    if late.excess < 0.002:
        return f"No rank holds the others up for long; they wait most for rank {rank}{times}."
    return (
        f"The others wait most for rank {rank}{times}: it {doing} for {late.excess:.1%} of the step more "
        "than the mean of all ranks."
    )


def host_bound(host: float) -> str:
    """What to do where devices have nothing to run for this share of the time, in a sentence; empty for a small one."""
    if host < HOST_BOUND:
        return ""
    times = min(20, int(1 / max(1 - host, 0.05)))
    more = f"{times} times the batch" if times > 1 else "A larger batch"
    return (
        f"Bound by its host: the GPU had nothing to run for {host:.0%} of the time. {more} (data.global_batch) would "
        "take hardly longer; so would more layers or a wider model."
    )


def busy_is_known(log: MetricsLog) -> bool:
    """Whether host time contains the gaps between kernels of a GPU in most steps of a run."""
    known = sum("dry" in event and not event.get("busy_unknown") for event in log.steps)
    return 2 * known > len(log.steps)


def device_sentence(log: MetricsLog, account: Account) -> str:
    """What the accounts of a run on GPUs say of its host, or that they cannot; nothing of a run on CPUs."""
    if not any("dry" in event for event in log.steps):
        return ""
    if not busy_is_known(log):
        return "Busy time of the GPUs is unknown: gaps between their kernels count as compute, not as host."
    return host_bound(account.shares["host"])


def slowest_of_steps(log: MetricsLog) -> list[int]:
    """The rank that was waited for, of every step that names one."""
    return [int(rank) for event in log.steps if (rank := number(event.get("slowest"))) is not None]


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many values lie in each bin; what lies above the last edge counts in the last bin."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = sum(value >= edge for edge in edges[1:-1])
        counts[place] += 1
    return counts


def _row(event: Event) -> tuple[float, dict[str, float]] | None:
    ms = number(event.get("step_ms"))
    shares = {cause: number(event.get(cause)) for cause in CAUSES}
    known = {cause: value for cause, value in shares.items() if value is not None}
    return None if ms is None or len(known) < len(CAUSES) else (ms, known)


def _ranks_event(event: Event) -> list[Parts]:
    columns = [event.get(name) for name in ("total", "compute", "straggler", "comm")]
    lists = [[number(value) for value in column] for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len({len(one) for one in lists}) != 1:
        return []
    rows = [[value for value in row if value is not None] for row in zip(*lists)]
    return (
        [Parts(*row) for row in rows] if all(len(row) == len(columns) and row[0] > 0 for row in rows) else []
    )
