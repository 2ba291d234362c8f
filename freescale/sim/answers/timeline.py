"""A simulated run as a Chrome trace of chosen ranks: open it in ui.perfetto.dev beside that of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from freescale.sim.answers.whatif import Simulated, simulate_features
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.engine.accounts import Record, spans_of
from freescale.trace import KeptStep, RankSpans, RunSpans, Span, split_step, write_trace

STEPS = 12
"""Enough to see the schedule settle; the trace of 4,096 ranks and many steps opens in no viewer."""


def simulated_spans(
    setting: Setting,
    features: Features,
    *,
    num_ranks: int,
    ranks: Sequence[int] | None = None,
    num_steps: int = STEPS,
) -> RunSpans:
    """The spans of some ranks (default: slowest, median and fastest by work) over a few steps."""
    seen: list[tuple[int, Record]] = []
    made = simulate_features(
        setting,
        features,
        num_ranks=num_ranks,
        num_steps=num_steps,
        plan_steps=num_steps,
        observe=lambda first, record: seen.append((first, record)),
    )
    chosen = sorted(set(ranks if ranks is not None else typical_ranks(made)))
    return RunSpans([_rank(made, seen, rank, num_ranks) for rank in chosen])


def typical_ranks(made: Simulated) -> list[int]:
    """The ranks that compute most, as much as the middle one, and least."""
    order = np.argsort(made.outcome.accounts.compute.sum(axis=0), kind="stable")
    return [int(order[-1]), int(order[len(order) // 2]), int(order[0])]


def write_timeline(path: Path, spans: RunSpans) -> Path:
    """Write the trace, in the form of `freescale report`'s."""
    return write_trace(path, spans)


def _rank(made: Simulated, seen: Sequence[tuple[int, Record]], rank: int, num_ranks: int) -> RankSpans:
    by_step: dict[int, list[Span]] = {}
    for first, record in seen:
        for row in range(len(record.step_ends)):
            step = first + row + 1
            by_step[step] = spans_of(made.program, record, rank=rank, row=row, step=step)
    every = [span for spans in by_step.values() for span in spans]
    ends = [0.0, *made.outcome.ends[:, rank].tolist()]
    steps = {
        step: KeptStep(step, ends[step - 1], ends[step], split_step(ends[step - 1], ends[step], every), spans)
        for step, spans in by_step.items()
    }
    return RankSpans(rank, {"rank": rank, "num_ranks": num_ranks, "simulated": True}, steps)
