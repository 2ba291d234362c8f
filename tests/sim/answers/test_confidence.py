"""What is called measured was measured: lengths, ranks and cores of a prediction beside those of its profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freescale.sim.answers.confidence import Mark, marks
from freescale.sim.costs.setting import Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import Profile, load_profile
from freescale.sim.inputs.workload import Workload


def cpu_profile(*, longest: int = 200, **facts: Any) -> Profile:
    """One that measured two and four ranks on two cores, with histories of up to `longest` events."""
    shipped = load_profile("cpu-aarch64")
    return replace(
        shipped,
        rates={**shipped.rates, "longest_profiled": float(longest)},
        facts={**shipped.facts, "cores": 2, **facts},
    )


def found(profile: Profile, lengths: str, *, ranks: int = 2, cluster: str = "cpu") -> dict[str, Mark]:
    setting = Setting(Workload(lengths=lengths), profile, load_cluster(cluster))
    return {mark.part: mark for mark in marks(setting, num_ranks=ranks)}


def test_longer_histories_than_a_cpu_was_profiled_with_are_told() -> None:
    """Lengths up to 8,192 were calibrated by a profile of 200."""
    told = found(cpu_profile(), "lognormal:512,1.0,8192")
    longer = told["longer histories than were profiled"]
    assert longer.state == "extrapolated"
    assert "above 200 events" in longer.why
    assert "up to 8,192, with 97% of the events" in longer.why
    assert told["forward"].state == told["backward"].state == "extrapolated"
    assert told["update"].state == "calibrated"


@pytest.mark.parametrize("cluster", ["cpu", "h200"])
def test_nothing_is_said_of_longer_histories_where_there_are_none(cluster: str) -> None:
    profile = cpu_profile() if cluster == "cpu" else load_profile("h200")
    told = found(profile, "lognormal:50,1.0,200", cluster=cluster)
    assert "longer histories than were profiled" not in told
    assert told["forward"].state == "calibrated"


def test_a_few_longer_histories_leave_the_compute_measured() -> None:
    told = found(cpu_profile(longest=4093), "lognormal:512,1.0,8192")
    assert "longer histories than were profiled" in told
    assert told["forward"].state == "calibrated"


def test_ranks_that_share_a_gpu_are_told_of_longer_histories_too() -> None:
    shared = replace(load_profile("h200"), shared_by=4)
    told = found(shared, "fixed:8000", ranks=4, cluster="h200")
    assert "100% of the events" in told["longer histories than were profiled"].why


@pytest.mark.parametrize(("ranks", "told"), [(2, False), (4, False), (8, True)])
def test_more_ranks_than_were_measured_are_more_than_those_that_ran_at_once(ranks: int, told: bool) -> None:
    """Four were measured; the exchange of two was said to be extrapolated."""
    parts = found(cpu_profile(cores=16), "fixed:100", ranks=ranks)
    assert ("more ranks than were measured" in parts) is told
    assert "two and 4" in parts["exchange rate and latency"].why
    assert "a core for every rank" not in parts


def test_a_profile_that_measured_two_ranks_says_so_of_four() -> None:
    profile = cpu_profile()
    only_two = tuple(name for name in profile.measured if not name.endswith("_per_rank"))
    parts = found(replace(profile, measured=only_two), "fixed:100", ranks=4)
    assert parts["more ranks than were measured"].why == "exchanges were measured on two"
    assert parts["a core for every rank"].why.startswith("2 cores")
    assert not {"more ranks than were measured", "a core for every rank"} & set(found(profile, "fixed:100"))


def test_hosts_of_several_ranks_were_not_measured_by_a_profile_of_one() -> None:
    part = "hosts of several ranks of a machine"
    alone, many = (found(load_profile("h200"), "fixed:400", ranks=n, cluster="h200") for n in (1, 8))
    shared = found(replace(load_profile("h200"), shared_by=4), "fixed:400", ranks=4, cluster="h200")
    assert many[part].state == "extrapolated"
    assert part not in alone
    assert part not in shared, "they were measured side by side"
