"""How long every stage of a step takes on every rank: from loads, ids, a profile and a cluster to seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from freescale.balance import FloatArray
from freescale.sim.costs.compute_times import compute_times, first_bucket
from freescale.sim.costs.id_times import id_times
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.rank_links import measured_s
from freescale.sim.costs.row_times import row_times
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.costs.traffic import traffic_of
from freescale.sim.inputs.profile import BY_LAYER, Timing


@dataclass(frozen=True, eq=False)
class Durations:
    """[steps, ranks] seconds of the parts of a step; `schedules.py` puts them in order.

    Args:
        compute: forward and backward, slowed by what travels beside it; without `weights`.
        forward: the part of `compute` that comes first.
        weights: gradients of weights that are computed after the rows' have left.
        contention: the part of `compute` that is this slowing down.
        lead: from the first bucket of dense gradients to the end of the backward, or of `weights`.
        network_bytes: of rows, gradients and ids, that a rank sends to other nodes and receives from them.
        bucket_share: of dense gradients, what travels in one piece.
    """

    control: FloatArray
    host: FloatArray
    find: FloatArray
    counts: FloatArray
    ids: FloatArray
    gather: FloatArray
    gather_late: FloatArray
    gather_early: FloatArray
    rows: FloatArray
    late_rows: FloatArray
    early_rows: FloatArray
    compute: FloatArray
    forward: FloatArray
    weights: FloatArray
    contention: FloatArray
    lead: FloatArray
    dense_total: FloatArray
    dense_last: FloatArray
    optimizer: FloatArray
    grads: FloatArray
    urgent_grads: FloatArray
    parked_grads: FloatArray
    update: FloatArray
    update_urgent: FloatArray
    update_parked: FloatArray
    masks: FloatArray
    exposed_bytes: float
    hidden_bytes: float
    busiest_owner: float = 1.0
    network_bytes: float = 0.0
    bucket_share: float = 1.0


def measure_out(
    setting: Setting, loads: Loads, features: Features, *, num_ranks: int, num_steps: int
) -> Durations:
    """Seconds of all parts, for `num_steps` steps of the planned loads, begun again when they run out."""
    loads = _in_turn(loads, num_steps)
    traffic = traffic_of(setting, loads, features, num_ranks=num_ranks)
    rows, ids = row_times(traffic), id_times(traffic)
    work = setting.workload
    dense_total = traffic.sum_of(work.dense_bytes)
    dense_last = traffic.sum_of(min(work.dense_bytes, work.bucket_bytes))
    compute = compute_times(traffic, loads, rows=rows, ids=ids, dense_total=dense_total)
    flat, beside_sum = np.ones_like(traffic.slow), np.zeros_like(traffic.slow)
    if setting.profile.device == "cpu" and features.prioritized:
        # The model's time has these: beside it nothing of them hides the host.
        none = np.zeros_like(traffic.slow)
        rows = rows._replace(find=none, gather_early=none, update_parked=none)
        if features.splits:
            # The urgent chain begins when the model is through: it computes beside the sum of dense gradients, in
            # which the training thread stands still most of the time, and holds that up.
            beside_sum = rows.gather_late + rows.update_urgent
    # Dense gradients pass bulk on the link: what travels beside them is held up for as long.
    rows = rows._replace(parked_grads=rows.parked_grads + dense_total)
    optimizer = setting.profile.times[_optimizer(setting, features, num_ranks)]
    return Durations(
        **rows._asdict(),
        **ids._asdict(),
        **compute._asdict(),
        **traffic.sent_bytes()._asdict(),
        # Hosts of GPUs add the losses of a step up when it is long past.
        control=flat * (measured_s(setting, "control_us", num_ranks) if traffic.own_links else 0.0),
        host=_host_s(setting, loads, features, num_ranks) * flat,
        dense_total=dense_total + beside_sum,
        dense_last=dense_last + beside_sum,
        optimizer=optimizer.seconds(tokens=0.0) * traffic.slow,
        busiest_owner=traffic.owners.busiest_owner,
        bucket_share=first_bucket(work),
    )


def _in_turn(loads: Loads, num_steps: int) -> Loads:
    turn = np.arange(num_steps) % len(loads.tokens)
    return replace(loads, samples=loads.samples[turn], tokens=loads.tokens[turn], squares=loads.squares[turn])


def _host_time(setting: Setting, features: Features) -> Timing:
    times = setting.profile.times
    return times.get("host_hiding", times["host"]) if features.prioritized else times["host"]


def _host_s(setting: Setting, loads: Loads, features: Features, num_ranks: int) -> FloatArray:
    """Time in which a rank has nothing to run; a split step of a GPU is many graphs, and one alone was profiled."""
    own = _host_time(setting, features).seconds(samples=loads.samples, tokens=loads.tokens)
    if not (features.splits and num_ranks > 1 and loads.replayable):
        return own
    # The forward is cut before every piece of dense gradients whose sum it has to wait for, their computation behind.
    num_cuts = 2 * math.ceil(1 / first_bucket(setting.workload))
    return own + 1e-6 * num_cuts * setting.profile.rates.get("graph_cut_us", 0.0)


def _optimizer(setting: Setting, features: Features, num_ranks: int) -> str:
    """Weights are updated at once, or layer by layer beside the next forward."""
    late = features.splits and num_ranks > 1 and setting.profile.device != "cpu"
    return BY_LAYER if late and BY_LAYER in setting.profile.times else "optimizer"
