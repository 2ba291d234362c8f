"""What of a prediction was measured, what was looked up, what was assumed: said before any number."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.balance import MOST_REPLAYED_TOKENS
from freescale.sim.costs.setting import Setting
from freescale.sim.inputs.profile import OPTIONAL_TIMES, TIMES, WEIGHTS

CALIBRATED, SPECIFIED, EXTRAPOLATED = "calibrated", "specified", "extrapolated"


@dataclass(frozen=True)
class Mark:
    """One part of a prediction: `state` is calibrated, specified or extrapolated; `why` says how so."""

    part: str
    state: str
    why: str


def marks(setting: Setting, *, num_ranks: int = 1) -> list[Mark]:
    """Every part of a prediction for so many ranks and how far to trust it."""
    profile, cluster = setting.profile, setting.cluster
    found = [_time_mark(setting, name) for name in (*TIMES, *OPTIONAL_TIMES) if name in profile.times]
    found.append(
        Mark(
            "jitter",
            CALIBRATED if "jitter" in profile.measured and setting.jitter is None else EXTRAPOLATED,
            f"spread of measured steps on {profile.hardware}"
            if "jitter" in profile.measured and setting.jitter is None
            else "assumed",
        )
    )
    found.append(_cost_mark(setting))
    if profile.device == "cpu":
        state = CALIBRATED if "rates.exchange_gb_per_s" in profile.measured else EXTRAPOLATED
        found.append(Mark("exchange rate and latency", state, "between two ranks of this machine"))
        found.append(Mark("more ranks than were measured", EXTRAPOLATED, "the exchange was measured on two"))
        return found
    if setting.knows_weights:
        found.append(
            Mark(
                "dense sums beside the next forward",
                EXTRAPOLATED,
                "of a split backward, pieces and layers equally long; with optim.clip_norm, or an encoder without "
                "calls_layers, a run waits for them sooner",
            )
        )
    if profile.shared_by > 1:
        count = profile.shared_by
        found.append(Mark("exchange rate and latency", CALIBRATED, f"between {count} ranks that share a GPU"))
        found.append(Mark(f"other numbers of ranks than {count}", EXTRAPOLATED, "shares of SMs are another"))
        return found
    for name, part in (("nvlink_gb_per_s", "links in the node"), ("nic_gb_per_s", "network")):
        found.append(Mark(part, SPECIFIED, cluster.sources.get(name, "given")))
    for name, part in (("latency_us", "latency"), ("sm_kernel_slowdown", "slowdown beside kernels")):
        source = cluster.sources.get(name, "given")
        _, by_profile = profile.slowdowns().get(name, (0.0, None))
        here = source.startswith("measured") and not (source == by_profile and _is_scaled(setting))
        found.append(Mark(part, CALIBRATED if here else EXTRAPOLATED, source))
    found.append(
        Mark(
            "many GPUs at once",
            EXTRAPOLATED,
            "no multi-node run was measured; queues in switches are not modelled",
        )
    )
    return found + _assumptions(setting, num_ranks)


def _assumptions(setting: Setting, num_ranks: int) -> list[Mark]:
    """What the model takes for granted beside its numbers."""
    cluster, profile = setting.cluster, setting.profile
    found = [
        Mark(
            "busiest owner of rows",
            EXTRAPOLATED,
            "popular rows dealt by chance, as hashing does, or evenly; without deduplication taken to be the same, "
            "which flatters runs without it",
        ),
        Mark(
            "rows beside the compute",
            EXTRAPOLATED,
            "kernels that gather and update rows under it take from it as long as they run alone",
        ),
        Mark("sum of losses", EXTRAPOLATED, "added up by hosts a step later; takes nothing of the step"),
        Mark("negatives", SPECIFIED, f"{setting.workload.negatives:g} a sample, all ids alike"),
    ]
    longest = profile.rates.get("longest_profiled", float(profile.model.get("max_length", 0)))
    found.append(
        Mark(
            "longer histories than were profiled",
            EXTRAPOLATED,
            f"by the fitted line above {longest:,.0f} events",
        )
    )
    for rate, part, told in (
        (
            "pads",
            "pads of replayed steps",
            "{:.1%} more tokens are computed, in runs of the profiled lengths and up to "
            f"{MOST_REPLAYED_TOKENS:,} tokens a GPU",
        ),
        ("graph_cut_us", "graphs of a split step", "{:.1f} us between two of them"),
    ):
        measured, known = f"rates.{rate}" in profile.measured, rate in profile.rates
        why = told.format(profile.rates[rate]) if known else "not in this profile; counted as nothing"
        found.append(Mark(part, CALIBRATED if measured else EXTRAPOLATED, why))
    if WEIGHTS not in profile.times and setting.weights_share > 0:
        share = (
            f"assumed to take {setting.weights_share:.0%} of the backward; not timed on {profile.hardware}"
        )
        found.append(Mark("postponed weight gradients", EXTRAPOLATED, share))
    if "host" not in str(profile.facts.get("gaps", "")):
        found.append(Mark("gaps between kernels", EXTRAPOLATED, "this profile counts them as compute"))
    if _is_scaled(setting):
        found.append(
            Mark("another kind of GPU", EXTRAPOLATED, "half by peak, half by memory rate, products too")
        )
    if num_ranks <= cluster.gpus_per_node:
        return found
    for name, part in (
        ("half_message_kb", "rate of small messages between nodes"),
        ("gloo_message_us", "ids between hosts of different nodes, where traffic is hidden"),
        ("id_stages", "stages of ids between hosts"),
        ("inside_message_us", "ids between hosts: handed on in a node"),
        ("ids_exchange_us", "ids between hosts: an exchange beside its messages"),
        ("ids_rank_us", "ids between hosts: sorted out by rank"),
        ("sum_hop_us", "small sums over nodes"),
        ("sm_free_network", "SM-free exchanges between nodes"),
    ):
        value = f"{getattr(cluster, name):g}: {cluster.sources.get(name, 'given')}"
        found.append(Mark(part, EXTRAPOLATED, value))
    return found


def _cost_mark(setting: Setting) -> Mark:
    """How far the balancer's costs are off, which makes stragglers as jitter does."""
    known = "rates.cost_error" in setting.profile.measured and setting.cost_error is None
    if known:
        why = f"spread of different batches about the fit on {setting.profile.hardware}"
        return Mark("error of costs", CALIBRATED, why)
    why = "assumed" if setting.cost_error is not None else "part of the jitter in this profile"
    return Mark("error of costs", EXTRAPOLATED, why)


def _time_mark(setting: Setting, name: str) -> Mark:
    profile, timing = setting.profile, setting.profile.times[name]
    if f"times.{name}" not in profile.measured:
        return Mark(name, EXTRAPOLATED, str(profile.facts.get("made_from", "assumed")))
    error = ""
    if timing.error is not None:
        error = f", held-out error {timing.error:.1%} (90 % below {timing.worst_error or 0:.1%})"
    where = f"profile of {profile.hardware}{error}"
    if _is_scaled(setting):
        return Mark(name, EXTRAPOLATED, f"{where}, times {setting.scale():.2f} for {setting.cluster.name}")
    return Mark(name, CALIBRATED, where)


def _is_scaled(setting: Setting) -> bool:
    """Whether the cluster has other GPUs than the profiled one."""
    return abs(setting.scale() - 1) > 1e-9
