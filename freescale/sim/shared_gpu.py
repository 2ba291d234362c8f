"""Ranks that share one GPU, as short runs of all of them have shown: what they do to each other is no sum of parts.

A kernel of one rank takes memory rate from the others; small kernels wait for their turn between large ones; flags of
an exchange are carried out between kernels of other processes. So `freescale profile --virtual-gpus N` lets N ranks
train for some steps, plain and hiding, and measures as lines over tokens what a step computes beside forward and
backward ("row_work") and for how long ranks that have all arrived stand still ("exchanges"). Those take the place of
the single parts, where a profile has them. Forward and backward stay a fit over lengths, and

    are never shorter than a step of one sample: a host needs so long to start all kernels ("shortest_ms")
    end sooner when neighbours are done ("neighbours_slowdown": what a token costs while all compute, over alone)
    last longer beside rows that are moved and updated ("hiding_slowdown")
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freescale.balance.arrays import FloatArray
from freescale.sim.durations import Durations
from freescale.sim.plans import Loads
from freescale.sim.profile import Profile


def as_in_runs(durations: Durations, profile: Profile, loads: Loads, *, hiding: bool) -> Durations:
    """The parts of ranks that share the profile's GPU; as they are where the profile has no short runs."""
    ending = "_hiding" if hiding else ""
    if f"row_work{ending}" not in profile.times or f"exchanges{ending}" not in profile.times:
        return durations
    tokens = loads.tokens[np.arange(len(durations.compute)) % len(loads.tokens)]
    row_work, exchanges = (profile.times[f"{name}{ending}"] for name in ("row_work", "exchanges"))
    none = np.zeros_like(durations.compute)
    compute, contention = _compute(durations, profile, tokens, hiding=hiding)
    return replace(
        durations,
        # What is hidden keeps its own lane and its own times.
        find=durations.find if hiding else none,
        counts=none,
        ids=durations.ids if hiding else none,
        compute=compute,
        contention=contention,
        optimizer=row_work.seconds(tokens=tokens) + none,
        gather=none,
        gather_late=none,
        update=none,
        update_urgent=none,
        rows=none,
        late_rows=none,
        grads=exchanges.seconds(tokens=tokens) + none,
        urgent_grads=exchanges.seconds(tokens=tokens) + none,
        dense_total=none,
        dense_last=none,
    )


def relieved(together: FloatArray, alone: FloatArray) -> FloatArray:
    """[steps, ranks] seconds of ranks that begin at once, if those that are done no longer hold up the others.

    Args:
        together: how long each takes while all compute.
        alone: how long it would take without neighbours; between the two by how many there are.
    """
    num_steps, num_ranks = together.shape
    left, ends, now = np.ones_like(together), np.zeros_like(together), np.zeros((num_steps, 1))
    for busy in range(num_ranks, 0, -1):
        share = (busy - 1) / max(1, num_ranks - 1)
        whole = np.maximum(alone + share * (together - alone), 1e-12)
        until = np.where(left > 0, left * whole, np.inf)
        first = until.argmin(axis=1)[:, None]
        soonest = np.take_along_axis(until, first, axis=1)
        now = now + soonest
        left = np.where(left > 0, np.maximum(left - soonest / whole, 1e-15), 0.0)
        np.put_along_axis(ends, first, now, axis=1)
        np.put_along_axis(left, first, 0.0, axis=1)
    return ends


def _compute(
    durations: Durations, profile: Profile, tokens: FloatArray, *, hiding: bool
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward, and how much of it is owed to rows beside them."""
    slowdown = max(1.0, profile.rates.get("neighbours_slowdown", 1.0))
    by_memory = 1e-3 * sum(profile.times[name].per_token_ms for name in ("forward", "backward")) * tokens
    together = durations.compute - durations.contention
    alone = np.maximum(together - (1 - 1 / slowdown) * by_memory, 0.0)
    shortest = 1e-3 * profile.rates.get("shortest_ms", 0.0)
    compute = np.maximum(relieved(together, alone), shortest)
    beside = max(1.0, profile.rates.get("hiding_slowdown", 1.0)) if hiding else 1.0
    return beside * compute, (beside - 1) * compute
