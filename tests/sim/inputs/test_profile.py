"""Profiles: those that ship can be read, others say what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from freescale.errors import DataError
from freescale.sim.answers.keys import changed
from freescale.sim.command import setting_before_changes
from freescale.sim.costs.setting import Features
from freescale.sim.inputs.profile import (
    OPTIONAL_TIMES,
    TIMES,
    Profile,
    Timing,
    load_profile,
    parse_profile,
    shipped,
)


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_are_whole(name: str) -> None:
    profile = load_profile(name)
    assert set(TIMES) <= set(profile.times) <= {*TIMES, *OPTIONAL_TIMES}
    assert profile.facts.get("command")
    again = parse_profile(profile.to_json(), where="again")
    assert again == profile


def test_a_timing_is_a_line() -> None:
    timing = Timing(fixed_ms=1.0, per_sample_ms=2.0, per_token_ms=0.5, per_square_ms=0.25)
    seconds = timing.seconds(
        samples=np.array([0.0, 3.0]), tokens=np.array([0.0, 10.0]), squares=np.array([0.0, 40.0])
    )
    np.testing.assert_allclose(seconds, [0.001, 0.022])


def change(**fields: object) -> str:
    document = json.loads(load_profile("h200").to_json())
    for path, value in fields.items():
        target = document
        *parents, last = path.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "mine.json is not a profile"),
        ("[]", "is not a profile"),
        (change(version=99), "version this release cannot read"),
        (change(times__forward=None), "times.forward is missing"),
        (change(times__update__per_token_ms=-1), "times.update.per_token_ms must be a number of at least 0"),
        (change(rates__exchange_gb_per_s=0), "rates.exchange_gb_per_s must be above 0"),
        (change(rates__control_us="x"), "rates.control_us must be a number"),
        (change(rates__sm_kernel_slowdown="x"), "rates.sm_kernel_slowdown must be a number"),
        (change(jitter=True), "jitter must be a number"),
        (change(model=3), "model must say what was trained"),
        (change(shared_by=0), "shared_by must be a whole number of at least 1"),
        (change(times__host_hiding=3), "times.host_hiding must be an object, got 3"),
    ],
)
def test_bad_profiles_say_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_profile(text, where="mine.json")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["# Read me", "[1]", '{"format": "another"}'])
def test_a_file_that_is_no_profile_leads_to_one(text: str) -> None:
    """A parser's words and nothing to do about them."""
    with pytest.raises(DataError, match=r"README\.md is not a profile") as caught:
        parse_profile(text, where="README.md")
    assert "cpu-aarch64, h200" in str(caught.value.allowed)
    assert caught.value.next_step == "freescale profile --out profile.json"


def test_an_unknown_profile_names_those_that_ship() -> None:
    with pytest.raises(DataError, match="cpu-aarch64, h200"):
        load_profile("h300")


def test_what_was_not_measured_is_marked() -> None:
    from freescale.sim.answers.confidence import marks
    from freescale.sim.costs.setting import Setting
    from freescale.sim.inputs.cluster import load_cluster, parse_cluster
    from freescale.sim.inputs.workload import Workload

    profile: Profile = load_profile("h200")
    elsewhere = Setting(Workload(), profile, load_cluster("h100"), profiled_on=load_cluster("h200"))
    found = {one.part: one.state for one in marks(elsewhere)}
    assert found["forward"] == found["latency"] == found["slowdown beside kernels"] == "extrapolated"
    assert found["jitter"] == "calibrated"
    assert found["network"] == "specified"
    same = Setting(Workload(), profile, load_cluster("h200"), profiled_on=load_cluster("h200"))
    found = {one.part: one.state for one in marks(same)}
    assert found["forward"] == found["slowdown beside kernels"] == "calibrated"
    own = parse_cluster(
        "base: h100\nlatency_us: {value: 9, source: measured on our H100s}", where="ours.yaml"
    )
    found = {one.part: one.state for one in marks(replace(elsewhere, cluster=own))}
    assert found["latency"] == "calibrated"
    assumed = Setting(Workload(), replace(profile, measured=()), load_cluster("h200"))
    assert {one.state for one in marks(assumed) if one.part in ("forward", "jitter")} == {"extrapolated"}


def test_predictions_take_the_slowdown_the_profile_measured() -> None:
    profile = load_profile("h200")
    chosen = setting_before_changes(profile="h200", cluster="h100").cluster
    assert chosen.sm_kernel_slowdown == profile.rates["sm_kernel_slowdown"] != 1.267
    assert chosen.sources["sm_kernel_slowdown"] == "measured by the profile of NVIDIA H200"
    before = setting_before_changes(profile="h200", cluster="h200")
    after, _ = changed(before, Features(), "cluster.sm_kernel_slowdown", "1.5")
    assert (after.cluster.sm_kernel_slowdown, after.cluster.sources["sm_kernel_slowdown"]) == (1.5, "given")
    assert replace(profile, measured=()).slowdowns() == {}
