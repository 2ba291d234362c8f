"""Ranks that share one GPU, as short runs of all of them have shown: what they do to each other is no sum of parts.

A kernel of one rank takes memory rate from the others; small kernels wait for their turn between large ones; flags of
an exchange are carried out between kernels of other processes. So `freescale profile --virtual-gpus N` lets N ranks
train for some steps, plain and hiding, and measures lines over tokens:

    row_work      what a step computes beside forward and backward
    exchanges     for how long ranks that have all arrived stand still

Where a profile has them, they take the place of the single parts. These still say how much more or less it is with
other features, rows or speeds than the short runs had: a line is multiplied with the parts as they are asked about
over the parts as they were profiled. Forward and backward stay a fit over lengths, with three corrections:

    shortest_ms            no step is shorter than one of a single sample: a host needs so long to start all kernels
    neighbours_slowdown    what a token costs while all compute, over alone: who outlasts the others gets faster
    hiding_slowdown        how much longer it takes beside rows that are moved and updated
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.durations import Durations, measure_out
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.setting import Features, Setting


def measure_out_shared(
    setting: Setting, loads: Loads, features: Features, *, num_ranks: int, num_steps: int
) -> Durations:
    """As `measure_out`, for ranks that share the profile's GPU; the same where the profile has no short runs."""
    profile, hiding = setting.profile, features.prioritized and num_ranks > 1
    asked = measure_out(setting, loads, features, num_ranks=num_ranks, num_steps=num_steps)
    ending = "_hiding" if hiding else ""
    if f"row_work{ending}" not in profile.times or f"exchanges{ending}" not in profile.times:
        return asked
    profiled = measure_out(
        _as_profiled(setting),
        loads,
        replace(features, dedup=True, sm_free=True),
        num_ranks=num_ranks,
        num_steps=num_steps,
    )
    tokens = loads.tokens[np.arange(num_steps) % len(loads.tokens)]
    row_work, exchanges = (
        profile.times[f"{name}{ending}"].seconds(tokens=tokens)
        * _over(parts(asked, hiding), parts(profiled, hiding))
        for name, parts in (("row_work", _row_work), ("exchanges", _exchanges))
    )
    compute, contention, weights = _compute(setting, asked, profiled, tokens, hiding=hiding)
    none = np.zeros_like(asked.compute)
    if num_ranks == 1:
        exchanges = none
    dense = none
    if features.splits:
        # Sums follow the weight gradients, rows travel beside them: each has its part of what was measured together.
        dense = exchanges * _over(asked.dense_last, _exchanges(asked, hiding=True))
        exchanges = exchanges - dense
    return replace(
        asked,
        # What is hidden keeps its own lane and its own times.
        find=asked.find if hiding else none,
        ids=asked.ids if hiding else none,
        control=none,
        counts=none,
        compute=compute,
        forward=_over(asked.forward, asked.compute) * compute,
        weights=weights,
        contention=contention,
        # Rows' part of it comes with the weights', wherever those are updated: it was measured as one.
        optimizer=row_work,
        gather=none,
        gather_late=none,
        update=none,
        update_urgent=none,
        rows=none,
        late_rows=none,
        grads=exchanges,
        urgent_grads=exchanges,
        dense_total=dense * _over(asked.dense_total, asked.dense_last),
        dense_last=dense,
    )


def relieved(together: FloatArray, alone: FloatArray, *, shared_by: int) -> FloatArray:
    """[steps, ranks] seconds of ranks that begin at once, if those that are done no longer hold up the others.

    Args:
        together: how long each takes while `shared_by` ranks compute.
        alone: how long it would take without neighbours; between the two by how many there are.
        shared_by: ranks that were measured; fewer may compute.
    """
    num_steps, num_ranks = together.shape
    left, ends, now = np.ones_like(together), np.zeros_like(together), np.zeros((num_steps, 1))
    for busy in range(num_ranks, 0, -1):
        share = min(1.0, (busy - 1) / max(1, shared_by - 1))
        whole = np.maximum(alone + share * (together - alone), 1e-12)
        until = np.where(left > 0, left * whole, np.inf)
        first = until.argmin(axis=1)[:, None]
        soonest = np.take_along_axis(until, first, axis=1)
        now = now + soonest
        left = np.where(left > 0, np.maximum(left - soonest / whole, 1e-15), 0.0)
        np.put_along_axis(ends, first, now, axis=1)
        np.put_along_axis(left, first, 0.0, axis=1)
    return ends


def _as_profiled(setting: Setting) -> Setting:
    """The same batches on ranks as those of the short runs: equally fast, with the profile's rows, on its GPU."""
    rows = int(setting.profile.model.get("row_bytes", setting.workload.row_bytes))
    return replace(
        setting,
        workload=replace(
            setting.workload,
            row_bytes=rows,
            stored_share=1.0,
            tables=str(setting.profile.model.get("tables", "")),
        ),
        speed_spread=0.0,
        slow_ranks=(),
        jitter=0.0,
        profiled_on=None,
    )


def _row_work(d: Durations, hiding: bool) -> FloatArray:
    return d.optimizer + (d.gather_late + d.update_urgent if hiding else d.find + d.gather + d.update)


def _exchanges(d: Durations, hiding: bool) -> FloatArray:
    return d.dense_last + (d.late_rows + d.urgent_grads if hiding else d.counts + d.ids + d.rows + d.grads)


def _over(asked: FloatArray, profiled: FloatArray) -> FloatArray:
    return np.divide(asked, profiled, out=np.ones_like(asked), where=profiled > 0)


def _compute(
    setting: Setting, asked: Durations, profiled: Durations, tokens: FloatArray, *, hiding: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward and backward, how much of it is owed to rows beside them, and the weight gradients split off from it."""
    profile = setting.profile
    slowdown = max(1.0, profile.rates.get("neighbours_slowdown", 1.0))
    by_memory = 1e-3 * sum(profile.times[name].per_token_ms for name in ("forward", "backward")) * tokens
    spared = np.clip((1 - 1 / slowdown) * _over(by_memory, _whole(profiled)), 0.0, 1.0)
    together = _whole(asked)
    shortest = 1e-3 * profile.rates.get("shortest_ms", 0.0)
    alone = (1 - spared) * together
    compute = np.maximum(relieved(together, alone, shared_by=profile.shared_by), shortest)
    beside = max(1.0, profile.rates.get("hiding_slowdown", 1.0)) if hiding else 1.0
    late = np.minimum(asked.weights * _over(compute, together), compute)
    return beside * compute - late, (beside - 1) * compute, late


def _whole(d: Durations) -> FloatArray:
    """Forward and the whole backward, with nothing beside them."""
    return d.compute - d.contention + d.weights
