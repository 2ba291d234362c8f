"""What of a prediction was measured, what was looked up, what was assumed: said before any number."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.balance import MOST_REPLAYED_TOKENS
from freescale.sim.costs.setting import Setting
from freescale.sim.inputs.profile import OPTIONAL_TIMES, TIMES, WEIGHTS
from freescale.sim.inputs.workload import draw_lengths

CALIBRATED, SPECIFIED, EXTRAPOLATED = "calibrated", "specified", "extrapolated"


@dataclass(frozen=True)
class Mark:
    """One part of a prediction: `state` is calibrated, specified or extrapolated; `why` says how so."""

    part: str
    state: str
    why: str


_BUSIEST_OWNER = Mark(
    "busiest owner of rows",
    EXTRAPOLATED,
    "popular rows dealt by chance, as hashing does, or evenly; without deduplication taken to be the same, which "
    "flatters runs without it",
)
# What grows with the squares of lengths.
_BY_LENGTH = ("forward", "backward", WEIGHTS)
# Histories that are drawn to see how many are longer than were profiled.
_DRAWN = 10_000
# `freescale profile` runs two and then so many CPU ranks at once.
_MOST_PROFILED_RANKS = 4


def marks(setting: Setting, *, num_ranks: int = 1) -> list[Mark]:
    """Every part of a prediction for so many ranks and how far to trust it."""
    profile, cluster = setting.profile, setting.cluster
    beyond = _beyond_profiled(setting)
    found = [_time_mark(setting, name, beyond) for name in (*TIMES, *OPTIONAL_TIMES) if name in profile.times]
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
    if beyond is not None:
        found.append(Mark("longer histories than were profiled", EXTRAPOLATED, beyond.words()))
    if profile.device == "cpu":
        return found + _of_one_machine(setting, num_ranks)
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


@dataclass(frozen=True)
class _Beyond:
    """Histories of a workload that are longer than all that were profiled; shares of histories and of their events."""

    profiled: float
    longest: int
    histories: float
    events: float

    def words(self) -> str:
        """How many, and by what they are foretold."""
        return (
            f"by the fitted line above {self.profiled:,.0f} events; {self.histories:.1%} of the histories are longer, "
            f"up to {self.longest:,}, with {self.events:.0%} of the events"
        )


def _beyond_profiled(setting: Setting) -> _Beyond | None:
    """How much of a prediction is about histories that nobody measured; None where nothing is."""
    profile = setting.profile
    profiled = profile.rates.get("longest_profiled", float(profile.model.get("max_length", 0)))
    lengths = draw_lengths(setting.workload, _DRAWN, seed=setting.seed)
    longer = lengths[lengths > profiled]
    if not longer.size:
        return None
    return _Beyond(
        profiled, int(longer.max()), longer.size / lengths.size, float(longer.sum() / lengths.sum())
    )


def _of_one_machine(setting: Setting, num_ranks: int) -> list[Mark]:
    """The rest of a prediction of CPU ranks: they talk as was measured, and share the cores there are."""
    profile = setting.profile
    measured = "rates.exchange_gb_per_s" in profile.measured
    is_four, most = "rates.exchange_us_per_rank" in profile.measured, _MOST_PROFILED_RANKS
    counts = f"two and {most}" if is_four else "two"
    found = [
        Mark(
            "exchange rate and latency",
            CALIBRATED if measured else EXTRAPOLATED,
            f"between {counts} ranks of one machine",
        ),
        _BUSIEST_OWNER,
        Mark("negatives", SPECIFIED, f"{setting.workload.negatives:g} a sample, all ids alike"),
    ]
    if num_ranks > (most if is_four else 2):
        found.append(
            Mark("more ranks than were measured", EXTRAPOLATED, f"exchanges were measured on {counts}")
        )
    cores = profile.facts.get("cores")
    if isinstance(cores, int) and num_ranks > cores:
        found.append(
            Mark("a core for every rank", EXTRAPOLATED, f"{cores} cores were there when this was measured")
        )
    return found + _postponed(setting)


def _postponed(setting: Setting) -> list[Mark]:
    """How long weight gradients take, where that is assumed."""
    if WEIGHTS in setting.profile.times or setting.weights_share == 0:
        return []
    share = f"assumed to take {setting.weights_share:.0%} of the backward; not timed on {setting.profile.hardware}"
    return [Mark("postponed weight gradients", EXTRAPOLATED, share)]


def _assumptions(setting: Setting, num_ranks: int) -> list[Mark]:
    """What the model takes for granted beside its numbers."""
    cluster, profile = setting.cluster, setting.profile
    found = [
        _BUSIEST_OWNER,
        Mark(
            "rows beside the compute",
            EXTRAPOLATED,
            "kernels that gather and update rows under it take from it as long as they run alone",
        ),
        Mark("sum of losses", EXTRAPOLATED, "added up by hosts a step later; takes nothing of the step"),
        Mark("negatives", SPECIFIED, f"{setting.workload.negatives:g} a sample, all ids alike"),
    ]
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
    found += _postponed(setting)
    if num_ranks > 1:
        alone = "one rank was timed, with a machine to itself; what hosts of several take from each other is unknown"
        found.append(Mark("hosts of several ranks of a machine", EXTRAPOLATED, alone))
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


def _time_mark(setting: Setting, name: str, beyond: _Beyond | None) -> Mark:
    profile, timing = setting.profile, setting.profile.times[name]
    if f"times.{name}" not in profile.measured:
        return Mark(name, EXTRAPOLATED, str(profile.facts.get("made_from", "assumed")))
    error = ""
    if timing.error is not None:
        error = f", held-out error {timing.error:.1%} (90 % below {timing.worst_error or 0:.1%})"
    where = f"profile of {profile.hardware}{error}"
    if _is_scaled(setting):
        return Mark(name, EXTRAPOLATED, f"{where}, times {setting.scale():.2f} for {setting.cluster.name}")
    if beyond is not None and beyond.events > 0.5 and name in _BY_LENGTH:
        return Mark(name, EXTRAPOLATED, f"{where}; most events are in histories longer than were profiled")
    return Mark(name, CALIBRATED, where)


def _is_scaled(setting: Setting) -> bool:
    """Whether the cluster has other GPUs than the profiled one."""
    return abs(setting.scale() - 1) > 1e-9
