"""How long every stage of a step takes on every rank: from loads, ids, a profile and a cluster to seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from freescale.balance import COEFFICIENTS, FloatArray
from freescale.errors import ConfigError
from freescale.sim.costs.links import Links
from freescale.sim.costs.moved_rows import ID_BYTES, MovedRows, moved_rows
from freescale.sim.costs.node_hops import NodeHops, can_hop
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.rank_links import links_of, measured_s, measured_sum
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.profile import BY_LAYER, WEIGHTS, Timing
from freescale.sim.inputs.workload import Workload


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
    turn = np.arange(num_steps) % len(loads.tokens)
    loads = replace(
        loads, samples=loads.samples[turn], tokens=loads.tokens[turn], squares=loads.squares[turn]
    )
    shape = (num_steps, num_ranks)
    times, work, cpu = setting.profile.times, setting.workload, setting.profile.device == "cpu"
    slow = setting.noise(shape) * setting.scale() / setting.speeds(num_ranks)
    placed: dict[str, Any] = {"even": features.even_owners, "num_ranks": num_ranks, "seed": setting.seed}
    rows = owners = moved_rows(work, loads, dedup=features.dedup, **placed)
    hops = None
    if features.node_dedup and can_hop(setting.cluster, num_ranks):
        hops = NodeHops(setting.cluster, num_ranks)
        owners = moved_rows(work, loads, dedup=True, **placed, local=hops.local)
    links, own_links = Links(links_of(setting, num_ranks), num_ranks), setting.profile.has_links
    sm_free = setting.is_sm_free(features, num_ranks)

    def at_owner(counts: FloatArray, name: str) -> FloatArray:
        return times[name].seconds(tokens=counts) * slow

    def travel(num_bytes: FloatArray, served: FloatArray | None = None) -> FloatArray:
        """Everybody asks everybody: nobody has all before the busiest owner is through."""
        busiest = num_bytes if served is None else np.maximum(num_bytes, served.max(axis=1, keepdims=True))
        return links.all_to_all(busiest, sm_free=sm_free)

    def both_ways(which: str) -> tuple[FloatArray, FloatArray]:
        """Rows on their way out, as they are stored, and their gradients on their way home."""
        share = work.stored_share
        num_bytes, served = _bytes_of(rows, which)
        if hops is None:
            return travel(share * num_bytes, share * served), travel(num_bytes, served)
        asked, at_owners = _bytes_of(owners, which)
        between = np.maximum(asked, at_owners.max(axis=1, keepdims=True))
        inside = np.maximum(num_bytes, hops.busiest_relay(served))
        out, home = (
            hops.travel(part * between, part * inside, sm_free=sm_free) + relay_work[which]
            for part in (share, 1.0)
        )
        return out, home

    # What a relay does with rows that pass: it copies them out, or sums their gradients.
    handed_on = {"moved": rows.moved, "shared": rows.shared, "alone": rows.alone}
    relay_work = {} if hops is None else {name: at_owner(each, "gather") for name, each in handed_on.items()}

    # Steps of a GPU are replayed: pads are computed like tokens, and nobody looks back from them.
    computed = replace(loads, tokens=loads.tokens * (1 + setting.profile.rates.get("pads", 0.0)))
    forward, backward = (
        times[name].seconds(samples=loads.samples, tokens=computed.tokens, squares=loads.squares) * slow
        for name in ("forward", "backward")
    )
    weights = _weight_gradients(setting, computed, features, num_ranks) * slow
    weights = np.minimum(weights, backward)
    dense_total, dense_last = (
        measured_sum(setting, nbytes, num_ranks) if own_links else links.sum_of(nbytes)
        for nbytes in (work.dense_bytes, min(work.dense_bytes, work.bucket_bytes))
    )
    flat = np.ones(shape)
    early_rows, parked_grads = both_ways("alone")
    find = times["find"].seconds(tokens=rows.asked) * slow
    if own_links:
        counts, ids, masks = flat * links.latency(), travel(rows.moved * ID_BYTES), travel(rows.moved * 0.25)
    elif hops is not None and features.prioritized:
        counts, ids = (flat * seconds for seconds in hops.host_messages())
        masks = ids
    elif features.prioritized:
        counts = ids = masks = flat * links.host_messages()
        if links.ids_in_two_stages:
            counts = np.zeros(shape)  # they are in the message of the ids
    else:
        # Where nothing is hidden ids travel as rows do, from device to device.
        counts, ids = travel(flat * ID_BYTES * num_ranks), travel(rows.moved * ID_BYTES)
        if hops is not None:
            each = flat * ID_BYTES
            counts = hops.travel(each * hops.num_nodes, each * hops.local, sm_free=sm_free)
            ids = hops.travel(owners.moved * ID_BYTES, rows.moved * ID_BYTES, sm_free=sm_free)
        masks = np.zeros(shape)
    update_parked, gather_early = (at_owner(owners.served_alone, name) for name in ("update", "gather"))
    beside = np.zeros(shape)
    if features.prioritized:
        beside = early_rows + parked_grads + (ids + masks if own_links else 0.0)
    compute = forward + backward - weights
    contention = _slowing(setting, compute, beside, dense_total, sm_free=sm_free)
    if features.prioritized and num_ranks > 1 and not own_links:
        # Kernels beside the compute take its SMs and its memory for as long as they would run alone.
        contention = contention + update_parked + gather_early + 2 * relay_work.get("alone", 0.0)
    rows_out, grads = both_ways("moved")
    gather, gather_late = at_owner(owners.served, "gather"), at_owner(owners.served_shared, "gather")
    update, update_urgent = at_owner(owners.served, "update"), at_owner(owners.served_shared, "update")
    late_rows, urgent_grads = both_ways("shared")
    beside_sum = np.zeros(shape)
    if cpu and features.prioritized:
        # One core a rank: all that the plain schedule does with rows is still done, and hiding adds to it. What the
        # communication thread does of it is taken from the model.
        done = find + counts + ids + gather + rows_out + grads + update + _hiding(setting, rows.asked)
        contention = contention + np.maximum(
            done - gather_late - late_rows - urgent_grads - update_urgent, 0.0
        )
        # So beside it nothing of that hides the host.
        find, gather_early, update_parked = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        if features.splits:
            # The urgent chain begins when the model is through: it computes beside the sum of dense gradients, in
            # which the training thread stands still most of the time, and holds that up.
            beside_sum = gather_late + update_urgent
    how: dict[str, Any] = {
        "prioritized": features.prioritized,
        "splits": features.splits,
        "stored_share": work.stored_share,
    }
    exposed, hidden = rows.bytes_of_a_rank(num_ranks if hops is None else hops.local, **how)
    network = _away_from_node(exposed + hidden, setting, num_ranks)
    if hops is not None:
        more = owners.bytes_of_a_rank(hops.num_nodes, **how)
        exposed, hidden, network = exposed + more[0], hidden + more[1], sum(more)
    return Durations(
        # Hosts of GPUs add the losses of a step up when it is long past.
        control=flat * (measured_s(setting, "control_us", num_ranks) if own_links else 0.0),
        host=_host_s(setting, loads, features, num_ranks) * flat,
        find=find,
        counts=counts,
        ids=ids,
        gather=gather,
        gather_late=gather_late,
        gather_early=gather_early,
        rows=rows_out,
        late_rows=late_rows,
        early_rows=early_rows,
        compute=compute + contention,
        # What travels beside the compute slows forward and backward alike.
        forward=np.divide(forward, compute, out=np.zeros(shape), where=compute > 0) * (compute + contention),
        weights=weights,
        contention=contention,
        lead=(weights if features.splits else backward) * (1 - _first_bucket(work)),
        dense_total=dense_total + beside_sum,
        dense_last=dense_last + beside_sum,
        optimizer=times[_optimizer(setting, features, num_ranks)].seconds(tokens=0.0) * slow,
        grads=grads,
        urgent_grads=urgent_grads,
        # Dense gradients pass bulk on the link: what travels beside them is held up for as long.
        parked_grads=parked_grads + dense_total,
        update=update,
        update_urgent=update_urgent,
        update_parked=update_parked,
        masks=masks,
        exposed_bytes=exposed,
        hidden_bytes=hidden,
        busiest_owner=owners.busiest_owner,
        network_bytes=network,
        bucket_share=_first_bucket(work),
    )


def _bytes_of(rows: MovedRows, which: str) -> tuple[FloatArray, FloatArray]:
    """Bytes asked for, and served by owners: all, those `shared` with the next batch, or those `alone`."""
    if which == "moved":
        return rows.moved_bytes, rows.served_bytes
    if which == "shared":
        return rows.shared_bytes, rows.served_shared_bytes
    return rows.alone_bytes, rows.served_alone_bytes


def _away_from_node(num_bytes: float, setting: Setting, num_ranks: int) -> float:
    """Of bytes that go to and come from all other ranks alike, those of other nodes."""
    local = min(setting.cluster.gpus_per_node, num_ranks)
    return num_bytes * (num_ranks - local) / max(1, num_ranks - 1)


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


def _slowing(
    setting: Setting, compute: FloatArray, beside: FloatArray, dense: float, *, sm_free: bool
) -> FloatArray:
    """What compute loses to transfers beside it: it runs at 1 / slowdown while they last, in whatever order they do."""
    if setting.profile.device == "cpu":
        return np.zeros_like(compute)
    kernels, engines = setting.cluster.sm_kernel_slowdown, setting.cluster.sm_free_slowdown
    factor = engines if sm_free else kernels
    by_rows = beside * (1 - 1 / factor)
    # Ranks that share a GPU add up by its copy engines.
    by_sums = dense * (1 - 1 / (engines if setting.profile.shared_by > 1 else kernels))
    return np.minimum(by_rows + by_sums, compute * (max(factor, kernels) - 1))


def _host_time(setting: Setting, features: Features) -> Timing:
    times = setting.profile.times
    return times.get("host_hiding", times["host"]) if features.prioritized else times["host"]


def _host_s(setting: Setting, loads: Loads, features: Features, num_ranks: int) -> FloatArray:
    """Time in which a rank has nothing to run; a split step of a GPU is many graphs, and one alone was profiled."""
    own = _host_time(setting, features).seconds(samples=loads.samples, tokens=loads.tokens)
    if not (features.splits and num_ranks > 1):
        return own
    # The forward is cut before every piece of dense gradients whose sum it has to wait for, their computation behind.
    num_cuts = 2 * math.ceil(1 / _first_bucket(setting.workload))
    return own + 1e-6 * num_cuts * setting.profile.rates.get("graph_cut_us", 0.0)


def _optimizer(setting: Setting, features: Features, num_ranks: int) -> str:
    """Weights are updated at once, or layer by layer beside the next forward."""
    late = features.splits and num_ranks > 1 and setting.profile.device != "cpu"
    return BY_LAYER if late and BY_LAYER in setting.profile.times else "optimizer"


def _hiding(setting: Setting, asked: FloatArray) -> FloatArray:
    """CPU time that the prioritized schedule adds on ranks that share their cores with it; 0 where it is not known."""
    rates = setting.profile.rates
    ms = rates.get("hiding_ms", 0.0) + 1e-3 * rates.get("hiding_us_per_id", 0.0) * asked
    return np.asarray(1e-3 * ms, dtype=np.float64)


def _first_bucket(work: Workload) -> float:
    """Share of dense gradients in a piece: after so much of the backward the first one is complete."""
    return min(1.0, work.bucket_bytes / work.dense_bytes) if work.dense_bytes > 0 else 1.0
