"""How ranks of a setting talk: over the links of a cluster, or at the speed their profile has measured."""

from __future__ import annotations

from dataclasses import replace

from freescale.sim.costs.setting import Setting
from freescale.sim.inputs.cluster import Cluster


def links_of(setting: Setting, num_ranks: int) -> Cluster:
    """Ranks of one CPU or one GPU talk at the profile's own speed."""
    if not setting.profile.has_links:
        return setting.cluster
    rates = setting.profile.rates
    one_machine = replace(setting.cluster, gpus_per_node=num_ranks, link_efficiency=1.0)
    rate = 1 / measured_s_per_gb(setting, "exchange", num_ranks)
    if "exchange_us_per_rank" in rates:
        latency, per_peer = 1e6 * measured_s(setting, "exchange_us", num_ranks), 0.0
    else:
        latency = rates["exchange_us"]
        per_peer = 0.0 if setting.profile.shared_by > 1 else setting.cluster.per_peer_us
    return replace(one_machine, nvlink_gb_per_s=rate, latency_us=latency, per_peer_us=per_peer)


def measured_s(setting: Setting, name: str, num_ranks: int) -> float:
    """Latency of these ranks: that of two CPU ranks, and what each more of them adds; that of all on one GPU."""
    rates = setting.profile.rates
    return 1e-6 * (rates[name] + rates.get(f"{name}_per_rank", 0.0) * max(0, num_ranks - 2))


def measured_sum(setting: Setting, nbytes: float, num_ranks: int) -> float:
    """Seconds to add up so many bytes over these ranks."""
    if num_ranks == 1 or nbytes == 0:
        return 0.0
    per_byte = 1e-9 * measured_s_per_gb(setting, "sum", num_ranks)
    return measured_s(setting, "sum_us", num_ranks) + nbytes * per_byte


def measured_s_per_gb(setting: Setting, name: str, num_ranks: int) -> float:
    """Seconds of 10^9 bytes: those of two CPU ranks, and what each more of them adds where they share the cores."""
    rates = setting.profile.rates
    return 1 / rates[f"{name}_gb_per_s"] + rates.get(f"{name}_s_per_gb_per_rank", 0.0) * max(0, num_ranks - 2)
