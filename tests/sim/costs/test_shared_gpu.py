"""Ranks that share one GPU: who is done leaves its memory rate to others, and short runs say what the rest takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freescale.sim.answers.confidence import marks
from freescale.sim.answers.whatif import predict, simulate_features
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.costs.shared_gpu import relieved
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import Profile, Timing, load_profile, parse_profile
from freescale.sim.inputs.workload import Workload

LINES = {
    "row_work": Timing(fixed_ms=2.0, per_token_ms=1e-5),
    "row_work_hiding": Timing(fixed_ms=1.0),
    "exchanges": Timing(fixed_ms=3.0),
    "exchanges_hiding": Timing(fixed_ms=0.5),
    "host_hiding": Timing(fixed_ms=0.1),
}


def shared(**rates: float) -> Profile:
    """A quarter of an H200 beside three others; in short runs it looked like this."""
    whole = load_profile("h200")
    return replace(
        whole, shared_by=4, jitter=0.0, times={**whole.times, **LINES}, rates={**whole.rates, **rates}
    )


def setting(profile: Profile) -> Setting:
    work = Workload(samples_per_gpu=16, lengths="lognormal:200,1.0,2000", table_rows=100_000)
    return Setting(workload=work, profile=profile, cluster=load_cluster("h200"))


def simulated(profile: Profile, features: Features, **options: int):
    return simulate_features(setting(profile), features, num_ranks=4, num_steps=12, plan_steps=6, **options)


STEPS = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.floats(0.01, 10))


@given(STEPS, st.floats(0, 1))
def test_nobody_ends_sooner_than_alone_or_later_than_beside_all(together, share):
    alone = share * together
    ends = relieved(together, alone, shared_by=together.shape[1])
    assert (ends <= together * (1 + 1e-9)).all()
    assert (ends >= alone * (1 - 1e-9)).all()
    # Whoever is done first has had all others beside it.
    np.testing.assert_allclose(ends.min(axis=1), together.min(axis=1))
    np.testing.assert_allclose(relieved(together, together, shared_by=2), together)


def test_the_last_one_goes_on_as_if_alone():
    # For 1 s both compute, and the second does half of its work; the rest it does at its own speed.
    together, alone = np.array([[1.0, 2.0]]), np.array([[0.5, 1.0]])
    np.testing.assert_allclose(relieved(together, alone, shared_by=2), [[1.0, 1.5]])
    # Two of many have few neighbours; one has none.
    assert (relieved(together, alone, shared_by=9) < relieved(together, alone, shared_by=2)).all()
    np.testing.assert_allclose(relieved(together[:, :1], alone[:, :1], shared_by=9), alone[:, :1])


def test_short_runs_take_the_place_of_single_parts():
    plain = Features(balancer="random", prioritized=False)
    d = simulated(shared(), plain).durations
    assert not any(part.any() for part in (d.find, d.gather, d.update, d.rows, d.dense_last))
    np.testing.assert_allclose(d.grads, 0.003)
    tokens = simulated(shared(), plain).loads.tokens
    np.testing.assert_allclose(d.optimizer[:6], 1e-3 * (2 + 1e-5 * tokens))
    hiding = simulated(shared(), Features()).durations
    np.testing.assert_allclose(hiding.urgent_grads, 0.0005)
    np.testing.assert_allclose(hiding.optimizer, 0.001)
    assert hiding.find.any()
    assert hiding.early_rows.any()
    # A profile without short runs is as it was.
    bare = replace(shared(), times=load_profile("h200").times)
    assert simulated(bare, plain).durations.update.all()


def test_a_step_is_never_shorter_than_its_kernels_take_to_start():
    slow = simulated(shared(shortest_ms=9.0), Features(prioritized=False)).durations
    fast = simulated(shared(), Features(prioritized=False)).durations
    np.testing.assert_allclose(slow.compute, np.maximum(fast.compute, 0.009))
    assert (fast.compute < 0.009).any()


def test_neighbours_that_are_done_help_those_that_are_not():
    random = Features(balancer="random", prioritized=False)
    held_up, helped = (simulated(shared(neighbours_slowdown=f), random) for f in (1.0, 1.5))
    assert helped.durations.compute.max() < held_up.durations.compute.max()
    assert helped.outcome.ends[-1].max() < held_up.outcome.ends[-1].max()


def test_hiding_slows_the_model_and_is_named_as_such():
    free, slowed = (simulated(shared(hiding_slowdown=f), Features()).durations for f in (1.0, 1.1))
    np.testing.assert_allclose(slowed.compute, 1.1 * free.compute)
    np.testing.assert_allclose(slowed.contention, 0.1 * free.compute)
    assert not free.contention.any()
    plain = simulated(shared(hiding_slowdown=1.1), Features(prioritized=False)).durations
    np.testing.assert_allclose(plain.compute, free.compute)


def test_such_a_profile_is_read_as_it_was_written():
    profile = shared(neighbours_slowdown=1.3, hiding_slowdown=1.05, shortest_ms=20.0)
    again = parse_profile(profile.to_json(), where="here")
    assert again.times["exchanges_hiding"] == LINES["exchanges_hiding"]
    assert again.rates == pytest.approx(profile.rates)


def test_other_features_rows_and_speeds_count_as_the_single_parts_say():
    plain = Features(balancer="random", prioritized=False)
    usual = simulated(shared(), plain).durations
    every_id = simulated(shared(), replace(plain, dedup=False)).durations
    assert (every_id.grads > 1.1 * usual.grads).all()
    wide = replace(setting(shared()), workload=replace(setting(shared()).workload, row_bytes=16 * 2048))
    wider = simulate_features(wide, plain, num_ranks=4, num_steps=12, plan_steps=6).durations
    assert (wider.grads > 1.5 * usual.grads).all()
    slow = replace(setting(shared()), slow_ranks=(0.5,))
    slower = simulate_features(slow, plain, num_ranks=4, num_steps=12, plan_steps=6).durations
    np.testing.assert_allclose(slower.optimizer[:, -1], 2 * usual.optimizer[:, -1])
    np.testing.assert_allclose(slower.optimizer[:, 0], usual.optimizer[:, 0])


def test_a_rank_alone_exchanges_nothing_and_ranks_together_are_not_faster():
    profile = shared(neighbours_slowdown=1.5, shortest_ms=1.0)
    same = {"host_hiding": profile.times["host"], "row_work_hiding": LINES["row_work"]}
    profile = replace(profile, times={**profile.times, **same})
    one = simulate_features(setting(profile), Features(), num_ranks=1, num_steps=8, plan_steps=4).durations
    assert not one.grads.any()
    row = predict(setting(profile), Features(), num_ranks=4, num_steps=12, plan_steps=6)
    assert 0.3 < row.efficiency < 1.0
    slow = replace(profile, times={**profile.times, "exchanges_hiding": Timing(fixed_ms=9.0)})
    row = predict(setting(slow), Features(), num_ranks=4, num_steps=12, plan_steps=6)
    assert row.limit == "exchanges on one GPU"


def test_what_short_runs_told_is_marked_as_measured():
    profile = replace(shared(), measured=("times.row_work",))
    found = {mark.part: mark.state for mark in marks(setting(profile))}
    assert found["row_work"] == "calibrated"
    assert found["exchanges"] == "extrapolated"
