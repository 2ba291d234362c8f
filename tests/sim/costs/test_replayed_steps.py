"""Replayed steps in predictions: pads are computed, a split step has gaps between its graphs and updates by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freescale.sim.answers.confidence import marks
from freescale.sim.answers.whatif import EVERYTHING, plan
from freescale.sim.costs.durations import Durations, measure_out
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import Profile, Timing, load_profile, parse_profile
from freescale.sim.inputs.workload import Workload

SPLIT = replace(EVERYTHING, postpone=True)
WHOLE = replace(EVERYTHING, postpone=False)


def profile(**rates: float) -> Profile:
    shipped = load_profile("h200")
    left_out = ("rates.pads", "rates.graph_cut_us", "times.optim_by_layer")
    known = {name: value for name, value in shipped.rates.items() if f"rates.{name}" not in left_out}
    times = {name: timing for name, timing in shipped.times.items() if f"times.{name}" not in left_out}
    before = (name for name in shipped.measured if name not in left_out)
    measured = (*before, *(f"rates.{name}" for name in rates))
    return replace(shipped, times=times, rates={**known, **rates}, measured=measured)


def durations(of: Profile, features: Features, ranks: int = 16, samples: int = 8) -> Durations:
    where = setting(of, samples)
    loads = plan(where, features, num_ranks=ranks, plan_steps=3)
    return measure_out(where, loads, features, num_ranks=ranks, num_steps=3)


def setting(of: Profile, samples: int = 8) -> Setting:
    work = Workload(
        samples_per_gpu=samples, lengths="lognormal:200,1.0,2000", dense_bytes=50e6, bucket_bytes=8e6
    )
    return Setting(workload=work, profile=of, cluster=load_cluster("h200"), jitter=0.0, cost_error=0.0)


@pytest.mark.parametrize("features", [WHOLE, SPLIT])
def test_pads_cost_what_tokens_cost_and_no_pairs(features: Features) -> None:
    without, padded = (durations(profile(pads=pads), features) for pads in (0.0, 0.05))
    more = (padded.compute + padded.weights) - (without.compute + without.weights)
    tokens = plan(setting(profile()), features, num_ranks=16, plan_steps=3).tokens
    times = profile().times
    by_tokens = 1e-3 * sum(times[name].per_token_ms for name in ("forward", "backward")) * tokens
    np.testing.assert_allclose(more, 0.05 * by_tokens, rtol=1e-6)
    np.testing.assert_array_equal(padded.rows, without.rows)
    np.testing.assert_array_equal(padded.host, without.host)


def test_steps_that_no_run_replays_have_neither_pads_nor_gaps() -> None:
    quick, slow = profile(), profile(pads=0.5, graph_cut_us=10.0)
    least, large = (durations(each, SPLIT, ranks=4, samples=2048) for each in (quick, slow))
    np.testing.assert_array_equal(large.compute, least.compute)
    np.testing.assert_array_equal(large.host, least.host)


def test_only_a_split_step_has_gaps_between_graphs() -> None:
    quick, slow = profile(), profile(graph_cut_us=10.0)
    np.testing.assert_array_equal(durations(slow, WHOLE).host, durations(quick, WHOLE).host)
    np.testing.assert_array_equal(durations(slow, SPLIT, 1).host, durations(quick, SPLIT, 1).host)
    # Seven pieces of 8 MB: so many cuts in the forward, and as many graphs of weight gradients.
    np.testing.assert_allclose(durations(slow, SPLIT).host - durations(quick, SPLIT).host, 14 * 10e-6)


def test_layers_that_are_updated_one_by_one_take_what_that_took() -> None:
    plain = profile()
    longer = replace(plain, times={**plain.times, "optim_by_layer": Timing(fixed_ms=0.7)})
    np.testing.assert_array_equal(durations(longer, WHOLE).optimizer, durations(plain, WHOLE).optimizer)
    np.testing.assert_allclose(durations(longer, SPLIT).optimizer, 0.7e-3, rtol=1e-9)
    alone = [durations(each, SPLIT, 1).optimizer for each in (longer, plain)]
    np.testing.assert_array_equal(*alone)


def test_a_profile_keeps_them_and_says_whether_it_has_them() -> None:
    found = profile(pads=0.021, graph_cut_us=4.0)
    assert parse_profile(found.to_json(), where="test").rates == found.rates
    told = {}
    for name, one in (("with", found), ("without", profile())):
        where = Setting(workload=Workload(), profile=one, cluster=load_cluster("h200"))
        told[name] = {
            mark.part: (mark.state, mark.why)
            for mark in marks(where, num_ranks=64)
            if "replayed" in mark.part
        }
    assert told["with"]["pads of replayed steps"][0] == "calibrated"
    assert "2.1%" in told["with"]["pads of replayed steps"][1]
    assert told["without"]["pads of replayed steps"] == (
        "extrapolated",
        "not in this profile; counted as nothing",
    )


def test_what_a_profile_says_without_having_measured_it_is_counted_and_told_as_such() -> None:
    guessed = replace(profile(pads=0.5), measured=profile().measured)
    state, why = next(
        (mark.state, mark.why) for mark in marks(setting(guessed), num_ranks=64) if "pads" in mark.part
    )
    assert state == "extrapolated"
    assert why.startswith("50.0% more tokens")
