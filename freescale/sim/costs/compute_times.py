"""How long forward and backward take, what of them can wait, and what they lose to traffic beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from freescale.balance import COEFFICIENTS, FloatArray
from freescale.errors import ConfigError
from freescale.sim.costs.id_times import IdTimes
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.row_times import RowTimes
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.costs.traffic import Traffic
from freescale.sim.inputs.profile import WEIGHTS
from freescale.sim.inputs.workload import Workload


class ComputeTimes(NamedTuple):
    """[steps, ranks] seconds; what each is, `Durations` says."""

    compute: FloatArray
    forward: FloatArray
    weights: FloatArray
    contention: FloatArray
    lead: FloatArray


def compute_times(
    traffic: Traffic, loads: Loads, *, rows: RowTimes, ids: IdTimes, dense_total: float
) -> ComputeTimes:
    """Forward and backward beside this traffic."""
    setting, features = traffic.setting, traffic.features
    # In steps of a GPU that are replayed pads are computed like tokens, and nobody looks back from them.
    pads = setting.profile.rates.get("pads", 0.0) if loads.replayable else 0.0
    loads = replace(loads, tokens=loads.tokens * (1 + pads))
    forward, backward = (
        setting.profile.times[name].seconds(samples=loads.samples, tokens=loads.tokens, squares=loads.squares)
        * traffic.slow
        for name in ("forward", "backward")
    )
    weights = _weight_gradients(setting, loads, features, traffic.num_ranks) * traffic.slow
    weights = np.minimum(weights, backward)
    compute = forward + backward - weights
    contention = _contention(traffic, rows, ids, compute=compute, dense=dense_total)
    share = np.divide(forward, compute, out=np.zeros_like(compute), where=compute > 0)
    return ComputeTimes(
        compute=compute + contention,
        # What travels beside the compute slows forward and backward alike.
        forward=share * (compute + contention),
        weights=weights,
        contention=contention,
        lead=(weights if features.splits else backward) * (1 - first_bucket(setting.workload)),
    )


def _weight_gradients(setting: Setting, loads: Loads, features: Features, num_ranks: int) -> FloatArray:
    """What a split backward puts off, as the profile has measured it; nothing where it is not split."""
    if not features.splits or num_ranks == 1:
        return np.zeros_like(loads.tokens, dtype=np.float64)
    line = setting.profile.times.get(WEIGHTS)
    if line is None and setting.weights_share > 0:
        backward = setting.profile.times["backward"]
        line = replace(
            backward, **{name: setting.weights_share * getattr(backward, name) for name in COEFFICIENTS}
        )
    if line is None:
        raise ConfigError(
            f"the profile of {setting.profile.hardware} does not say how long weight gradients take",
            got="features.postpone=true",
            next_step="measure it again with `freescale profile --out FILE`, or assume it with setting.weights_share",
        )
    return line.seconds(samples=loads.samples, tokens=loads.tokens, squares=loads.squares)


def _contention(
    traffic: Traffic, rows: RowTimes, ids: IdTimes, *, compute: FloatArray, dense: float
) -> FloatArray:
    """What compute loses to everything that is done beside it."""
    setting = traffic.setting
    if not traffic.features.prioritized:
        return _slowing(setting, compute, np.zeros_like(compute), dense, sm_free=traffic.sm_free)
    beside = rows.early_rows + rows.parked_grads + (ids.ids + ids.masks if traffic.own_links else 0.0)
    contention = _slowing(setting, compute, beside, dense, sm_free=traffic.sm_free)
    if traffic.num_ranks > 1 and not traffic.own_links:
        # Kernels beside the compute take its SMs and its memory for as long as they would run alone.
        relays = 2 * traffic.relay_work.get("alone", 0.0)
        contention = contention + rows.update_parked + rows.gather_early + relays
    if setting.profile.device == "cpu":
        contention = contention + _on_the_same_core(rows, ids, _hiding(setting, traffic.rows.asked))
    return contention


def _slowing(
    setting: Setting, compute: FloatArray, beside: FloatArray, dense: float, *, sm_free: bool
) -> FloatArray:
    """What compute loses to transfers beside it: it runs at 1 / slowdown while they last, in whatever order they do."""
    if setting.profile.device == "cpu":
        return np.zeros_like(compute)
    kernels, engines = setting.cluster.sm_kernel_slowdown, setting.cluster.sm_free_slowdown
    factor = engines if sm_free else kernels
    by_rows = beside * (1 - 1 / factor)
    # Ranks that share a GPU add up as their rows travel: by short copies, not by blocks that stay.
    by_sums = dense * (1 - 1 / (engines if setting.profile.shared_by > 1 else kernels))
    return np.minimum(by_rows + by_sums, compute * (max(factor, kernels) - 1))


def _on_the_same_core(rows: RowTimes, ids: IdTimes, hiding: FloatArray) -> FloatArray:
    """One core a rank: all that the plain schedule does with rows is still done, and hiding adds to it.

    What the communication thread does of it is taken from the model.
    """
    done = rows.find + ids.counts + ids.ids + rows.gather + rows.rows + rows.grads + rows.update + hiding
    urgent = (rows.gather_late, rows.late_rows, rows.urgent_grads, rows.update_urgent)
    return np.maximum(done - urgent[0] - urgent[1] - urgent[2] - urgent[3], 0.0)


def _hiding(setting: Setting, asked: FloatArray) -> FloatArray:
    """CPU time that the prioritized schedule adds on ranks that share their cores with it; 0 where it is not known."""
    rates = setting.profile.rates
    ms = rates.get("hiding_ms", 0.0) + 1e-3 * rates.get("hiding_us_per_id", 0.0) * asked
    return np.asarray(1e-3 * ms, dtype=np.float64)


def first_bucket(work: Workload) -> float:
    """Share of dense gradients in a piece: after so much of the backward the first one is complete."""
    return min(1.0, work.bucket_bytes / work.dense_bytes) if work.dense_bytes > 0 else 1.0
