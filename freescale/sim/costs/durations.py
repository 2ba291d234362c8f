"""How long every stage of a step takes on every rank: from loads, ids, a profile and a cluster to seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from freescale.balance import CostModel, FloatArray
from freescale.sim.costs.links import Links
from freescale.sim.costs.moved_rows import ID_BYTES, moved_rows
from freescale.sim.costs.plans import Loads
from freescale.sim.inputs.cluster import Cluster
from freescale.sim.inputs.profile import Profile, Timing, cost_model_of
from freescale.sim.inputs.workload import Workload

# Of an HSTU training step on an H200, attention and matrix products take about half; the rest waits for memory.
MEMORY_BOUND = 0.5


@dataclass(frozen=True)
class Features:
    """Which of the ideas are on.

    Args:
        balancer: "random" deals samples out in turn, "kk_equal" is Karmarkar-Karp with equal counts, "freescale".
        prioritized: rows and gradients that have time travel under compute.
        dedup: every distinct row travels once; off: every occurrence.
        sm_free: embedding exchanges hold no SM. Dense gradients are summed by kernels either way.
        window: steps planned together.
        token_cap: most tokens of a rank, in means.
    """

    balancer: str = "freescale"
    prioritized: bool = True
    dedup: bool = True
    sm_free: bool = True
    window: int = 1
    token_cap: float | None = 1.10

    def words(self) -> str:
        """What is on."""
        parts = [] if self.balancer == "random" else [{"kk_equal": "KK-equal"}.get(self.balancer, "balance")]
        parts += ["prioritized"] if self.prioritized else []
        parts += ["dedup"] if self.dedup else []
        parts += ["SM-free"] if self.sm_free else []
        parts += [f"window {self.window}"] if self.window > 1 else []
        return " + ".join(parts) or "all off"


@dataclass(frozen=True, eq=False)
class Durations:
    """[steps, ranks] seconds of the parts of a step; `schedules.py` puts them in order.

    Args:
        compute: forward and backward, slowed by what travels beside it.
        contention: the part of `compute` that is this slowing down.
        lead: from the first bucket of dense gradients to the end of the backward.
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


@dataclass(frozen=True)
class Setting:
    """Everything a prediction rests on but the features and the number of ranks."""

    workload: Workload
    profile: Profile
    cluster: Cluster
    seed: int = 0
    speed_spread: float = 0.0
    slow_ranks: tuple[float, ...] = ()
    jitter: float | None = None
    profiled_on: Cluster | None = None

    @property
    def rank_word(self) -> str:
        """What a rank computes on, for people."""
        return "rank" if self.profile.device == "cpu" else "GPU"

    def ranks_in_words(self, count: int) -> str:
        """`1 GPU`, `256 GPUs`, or `4 ranks` where a CPU was profiled."""
        return f"{count:,} {self.rank_word}{'' if count == 1 else 's'}"

    def cost_model(self) -> CostModel:
        """What the balancer plans with: the profile's forward and backward."""
        return cost_model_of(self.profile.times)

    def scale(self) -> float:
        """Compute time on this cluster's GPU, times that on the profiled one: by peak and by memory rate."""
        if self.profiled_on is None:
            return 1.0
        by_peak = self.profiled_on.peak_tflops / self.cluster.peak_tflops
        by_memory = self.profiled_on.memory_tb_per_s / self.cluster.memory_tb_per_s
        return (1 - MEMORY_BOUND) * by_peak + MEMORY_BOUND * by_memory

    def speeds(self, num_ranks: int) -> FloatArray:
        """[ranks] persistent speeds: `speed_spread` as relative deviation, the last ranks as slow as given."""
        rng = np.random.default_rng([self.seed, 5])
        speeds = np.maximum(1 + self.speed_spread * rng.standard_normal(num_ranks), 0.2)
        for place, speed in enumerate(self.slow_ranks[:num_ranks]):
            speeds[-1 - place] = speed
        return speeds


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
    slow = _noise(setting, shape) * setting.scale() / setting.speeds(num_ranks)
    rows = moved_rows(setting.workload, loads, dedup=features.dedup)
    links, own_links = Links(_with_profile(setting, num_ranks), num_ranks), setting.profile.has_links

    def at_owner(counts: FloatArray, name: str) -> FloatArray:
        """Owners hold random parts of the table, so each has the mean of all ranks to do."""
        mean = np.broadcast_to(counts.mean(axis=1, keepdims=True), shape)
        return times[name].seconds(tokens=mean) * slow

    def travel(num_bytes: FloatArray) -> FloatArray:
        return links.all_to_all(num_bytes, sm_free=features.sm_free and not cpu)

    forward, backward = (
        times[name].seconds(samples=loads.samples, tokens=loads.tokens, squares=loads.squares) * slow
        for name in ("forward", "backward")
    )
    dense_total, dense_last = (
        _measured_sum(setting, nbytes, num_ranks) if own_links else links.sum_of(nbytes)
        for nbytes in (work.dense_bytes, min(work.dense_bytes, work.bucket_bytes))
    )
    early_rows, parked_grads = travel(rows.alone_bytes), travel(rows.alone_bytes)
    find = times["find"].seconds(tokens=rows.asked) * slow
    ids, masks = travel(rows.moved * ID_BYTES), travel(rows.moved * 0.25)
    update_parked, gather_early = at_owner(rows.alone, "update"), at_owner(rows.alone, "gather")
    flat = np.ones(shape)
    beside = early_rows + parked_grads + ids + masks if features.prioritized else np.zeros(shape)
    compute = forward + backward
    contention = _slowing(setting, compute, beside, dense_total, features)
    counts = flat * links.latency()
    rows_out, grads = (travel(rows.moved_bytes) for _ in range(2))
    gather, gather_late = at_owner(rows.moved, "gather"), at_owner(rows.shared, "gather")
    update, update_urgent = at_owner(rows.moved, "update"), at_owner(rows.shared, "update")
    late_rows, urgent_grads = (travel(rows.shared_bytes) for _ in range(2))
    if cpu and features.prioritized:
        # One core a rank: all that the plain schedule does with rows is still done, and hiding adds to it. What the
        # communication thread does of it is taken from the model.
        done = find + counts + ids + gather + rows_out + grads + update + _hiding(setting, rows.asked)
        contention = contention + np.maximum(
            done - gather_late - late_rows - urgent_grads - update_urgent, 0.0
        )
        # So beside it nothing of that hides the host.
        find, gather_early, update_parked = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    exposed, hidden = rows.bytes_of_a_rank(num_ranks, prioritized=features.prioritized)
    return Durations(
        control=flat
        * (_measured_s(setting, "control_us", num_ranks) if own_links else links.latency(per_peer=False)),
        host=_host_time(setting, features).seconds(samples=loads.samples, tokens=loads.tokens) * flat,
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
        contention=contention,
        lead=backward * (1 - _first_bucket(work)),
        dense_total=flat * dense_total,
        dense_last=flat * dense_last,
        optimizer=times["optimizer"].seconds(tokens=0.0) * slow,
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
    )


def _noise(setting: Setting, shape: tuple[int, int]) -> FloatArray:
    """Every rank and step a little faster or slower than the fit says, and never less than a fifth."""
    spread = setting.profile.jitter if setting.jitter is None else setting.jitter
    if spread == 0:
        return np.ones(shape)
    rng = np.random.default_rng([setting.seed, 9])
    return np.maximum(1 + spread * rng.standard_normal(shape), 0.2)


def _slowing(
    setting: Setting, compute: FloatArray, beside: FloatArray, dense: float, features: Features
) -> FloatArray:
    """What compute loses to transfers beside it: it runs at 1 / slowdown while they last, in whatever order they do."""
    if setting.profile.device == "cpu":
        return np.zeros_like(compute)
    kernels, engines = setting.cluster.sm_kernel_slowdown, setting.cluster.sm_free_slowdown
    factor = engines if features.sm_free else kernels
    by_rows = beside * (1 - 1 / factor)
    # Ranks that share a GPU add up by its copy engines.
    by_sums = dense * (1 - 1 / (engines if setting.profile.shared_by > 1 else kernels))
    return np.minimum(by_rows + by_sums, compute * (max(factor, kernels) - 1))


def _host_time(setting: Setting, features: Features) -> Timing:
    times = setting.profile.times
    return times.get("host_hiding", times["host"]) if features.prioritized else times["host"]


def _hiding(setting: Setting, asked: FloatArray) -> FloatArray:
    """CPU time that the prioritized schedule adds on ranks that share their cores with it; 0 where it is not known."""
    rates = setting.profile.rates
    ms = rates.get("hiding_ms", 0.0) + 1e-3 * rates.get("hiding_us_per_id", 0.0) * asked
    return np.asarray(1e-3 * ms, dtype=np.float64)


def _first_bucket(work: Workload) -> float:
    """Share of the backward after which the first piece of dense gradients is complete."""
    return min(1.0, work.bucket_bytes / work.dense_bytes) if work.dense_bytes > 0 else 1.0


def _with_profile(setting: Setting, num_ranks: int) -> Cluster:
    """Ranks of one CPU or one GPU talk at the profile's own speed."""
    if not setting.profile.has_links:
        return setting.cluster
    rates = setting.profile.rates
    one_machine = replace(setting.cluster, gpus_per_node=num_ranks, link_efficiency=1.0)
    per_peer = rates.get("exchange_us_per_rank")
    if per_peer is None:
        return replace(
            one_machine,
            nvlink_gb_per_s=rates["exchange_gb_per_s"],
            latency_us=rates["exchange_us"],
            per_peer_us=0.0 if setting.profile.shared_by > 1 else setting.cluster.per_peer_us,
        )
    return replace(
        one_machine,
        nvlink_gb_per_s=rates["exchange_gb_per_s"],
        latency_us=max(0.0, rates["exchange_us"] - per_peer),
        per_peer_us=per_peer,
    )


def _measured_s(setting: Setting, name: str, num_ranks: int) -> float:
    """Latency of these ranks: that of two CPU ranks, and what each more of them adds; that of all on one GPU."""
    rates = setting.profile.rates
    return 1e-6 * (rates[name] + rates.get(f"{name}_per_rank", 0.0) * max(0, num_ranks - 2))


def _measured_sum(setting: Setting, nbytes: float, num_ranks: int) -> float:
    if num_ranks == 1 or nbytes == 0:
        return 0.0
    return _measured_s(setting, "sum_us", num_ranks) + nbytes / (1e9 * setting.profile.rates["sum_gb_per_s"])
