"""What a prediction must obey, whatever its numbers: bandwidth helps, work costs, bounds hold, off is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.errors import ConfigError, DataError
from freescale.sim.answers.answer import profiled_cluster, simulate_answer
from freescale.sim.answers.keys import changed, known_keys, value_of
from freescale.sim.answers.sensitivity import influences
from freescale.sim.answers.whatif import (
    ABLATION,
    BASELINE,
    EVERYTHING,
    LADDER,
    Failures,
    limit,
    plan,
    predict,
    reduction,
    short_names,
    simulate_features,
)
from freescale.sim.costs.durations import measure_out
from freescale.sim.costs.moved_rows import moved_rows
from freescale.sim.costs.plans import plan_loads
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import Timing, load_profile
from freescale.sim.inputs.workload import Workload, draw_lengths
from freescale.trace import CAUSES
from tests.effort import examples

FEATURES = st.builds(
    Features,
    balancer=st.sampled_from(["random", "kk_equal", "freescale"]),
    prioritized=st.booleans(),
    dedup=st.booleans(),
    sm_free=st.booleans(),
    even_owners=st.booleans(),
    postpone=st.booleans(),
)
RATES = ("nvlink_gb_per_s", "nic_gb_per_s", "host_staged_gb_per_s", "link_efficiency")
LESS_IS_FASTER = (
    "latency_us", "node_latency_us", "per_peer_us", "sm_kernel_slowdown", "nic_sharing", "half_message_kb",
    "gloo_message_us", "inside_message_us", "ids_exchange_us", "ids_rank_us", "sum_hop_us",
)  # fmt: skip


def setting(**workload: object) -> Setting:
    small = {"samples_per_gpu": 6, "lengths": "lognormal:200,1.0,2000", "table_rows": 100_000, **workload}
    return Setting(
        workload=Workload(**small),  # type: ignore[arg-type]
        profile=load_profile("h200"),
        cluster=load_cluster("h100"),
        jitter=0.02,
        weights_share=0.2,
    )


def end_of(where: Setting, features: Features, *, ranks: int, loads: object = None) -> np.ndarray:
    return simulate_features(
        where, features, num_ranks=ranks, num_steps=8, plan_steps=4, loads=loads
    ).outcome.ends  # type: ignore[arg-type]


@examples(8, thorough=100)
@given(
    features=FEATURES,
    ranks=st.sampled_from([2, 8, 12, 24]),
    key=st.sampled_from(RATES),
    factor=st.floats(1, 20),
)
def test_more_bandwidth_never_slows(features: Features, ranks: int, key: str, factor: float) -> None:
    slow = setting()
    value = float(getattr(slow.cluster, key))
    faster = replace(
        slow.cluster, **{key: min(1.0, value * factor) if key == "link_efficiency" else value * factor}
    )
    before, after = (
        end_of(slow, features, ranks=ranks),
        end_of(replace(slow, cluster=faster), features, ranks=ranks),
    )
    assert (after <= before * (1 + 1e-12)).all()


@examples(8, thorough=200)
@given(features=FEATURES, key=st.sampled_from(LESS_IS_FASTER), factor=st.floats(1, 5))
def test_latency_sharing_and_contention_never_help(features: Features, key: str, factor: float) -> None:
    fast = setting()
    slower = replace(fast.cluster, **{key: float(getattr(fast.cluster, key)) * factor})
    before, after = (
        end_of(fast, features, ranks=16),
        end_of(replace(fast, cluster=slower), features, ranks=16),
    )
    assert (after >= before * (1 - 1e-12)).all()


@examples(8, thorough=200)
@given(
    features=FEATURES,
    ranks=st.integers(1, 20),
    more=st.floats(1, 4),
    part=st.sampled_from(["tokens", "squares"]),
)
def test_more_work_never_speeds_up(features: Features, ranks: int, more: float, part: str) -> None:
    """The same plan with more in it: every step ends as early or later."""
    where = setting()
    loads = plan(where, features, num_ranks=ranks, plan_steps=4)
    grown = replace(loads, **{part: getattr(loads, part) * more})
    before = end_of(where, features, ranks=ranks, loads=loads)
    after = end_of(where, features, ranks=ranks, loads=grown)
    assert (after >= before * (1 - 1e-9)).all()


def test_a_hair_more_work_makes_no_owner_more_even() -> None:
    """Draws were rounded: with half of one the busiest owner was a little less busy all at once."""
    where, features = setting(), Features(balancer="random", prioritized=True, dedup=False, even_owners=False)
    loads = plan(where, features, num_ranks=4, plan_steps=4)
    grown = replace(loads, tokens=loads.tokens * (1 + 2**-52))
    before, after = (end_of(where, features, ranks=4, loads=each) for each in (loads, grown))
    assert (after >= before * (1 - 1e-12)).all()


@examples(8, thorough=200)
@given(
    balancer=st.sampled_from(["random", "kk_equal", "freescale"]),
    ranks=st.integers(1, 40),
    samples=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_no_plan_is_below_its_bound(balancer: str, ranks: int, samples: int, seed: int) -> None:
    where = setting(samples_per_gpu=samples)
    loads = plan_loads(
        where.workload,
        num_ranks=ranks,
        num_steps=3,
        balancer=balancer,
        cost_model=where.cost_model(),
        seed=seed,
    )
    assert loads.planned >= loads.bound - 1e-9
    assert loads.samples.sum() == 3 * ranks * samples
    tokens = draw_lengths(where.workload, 3 * ranks * samples, seed=seed)
    assert loads.tokens.sum() == tokens.sum()
    assert loads.squares.sum() == pytest.approx(float((tokens.astype(float) ** 2).sum()))


def test_everything_off_is_the_baseline_of_the_ladder() -> None:
    where = setting()
    off = Features(
        balancer="random", prioritized=False, dedup=False, sm_free=False, even_owners=False, postpone=False
    )
    assert off == BASELINE == LADDER[0]
    one, two = (
        predict(where, features, num_ranks=8, num_steps=12, plan_steps=4) for features in (off, BASELINE)
    )
    assert one == two
    assert one.bubble == pytest.approx(one.straggler + one.comm + one.host)
    assert reduction(one, two) == 0


@pytest.mark.parametrize("features", [BASELINE, EVERYTHING, *ABLATION])
def test_one_gpu_has_nothing_to_wait_for(features: Features) -> None:
    alone = predict(setting(), features, num_ranks=1, num_steps=12, plan_steps=4)
    assert alone.straggler == pytest.approx(0, abs=1e-12)
    assert alone.comm == pytest.approx(0, abs=1e-12)
    assert alone.efficiency == pytest.approx(1)
    assert alone.exposed_mb == 0


def test_each_idea_moves_what_it_should() -> None:
    where = replace(setting(samples_per_gpu=24), cluster=replace(setting().cluster, sm_free_network=1.0))
    rows = {
        one: predict(where, one, num_ranks=32, num_steps=40, plan_steps=8) for one in (*LADDER, *ABLATION)
    }
    random, kk, balanced, hidden, dedup, free, even, postponed = (rows[one] for one in LADDER)
    assert balanced.straggler < kk.straggler < random.straggler
    assert hidden.exposed_mb < balanced.exposed_mb
    assert dedup.exposed_mb < hidden.exposed_mb
    assert dedup.comm < hidden.comm < balanced.comm
    assert free.contention < dedup.contention
    assert even.busiest_owner < free.busiest_owner
    assert postponed.comm < even.comm
    assert postponed.cost_per_billion < random.cost_per_billion


def test_the_longest_sample_is_named_as_the_limit() -> None:
    where = setting(samples_per_gpu=2, lengths="pareto:20,1.05,4000")
    where = replace(where, cluster=replace(where.cluster, gpus_per_node=64))  # ids take nothing from it
    one = predict(where, EVERYTHING, num_ranks=64, num_steps=12, plan_steps=4)
    assert one.limit == "longest sample"
    assert one.straggler > 0.25
    windowed = predict(where, replace(EVERYTHING, window=8), num_ranks=64, num_steps=16, plan_steps=16)
    assert windowed.bubble < one.bubble


@pytest.mark.parametrize(("device", "name"), [("cpu", "cores"), ("cuda", "SMs")])
def test_what_exchanges_take_from_the_compute_is_what_the_device_has(device: str, name: str) -> None:
    where = setting()
    where = replace(where, profile=replace(where.profile, device=device))
    shares = dict.fromkeys(CAUSES, 0.01)
    assert limit(where, made=object(), shares=shares, contention=0.2) == f"{name} taken by exchanges"  # type: ignore[arg-type]


def test_a_slow_rank_holds_up_those_who_do_not_know_it() -> None:
    # What every step takes, whatever its samples, is slower on it, too, and no plan takes that away.
    slow = replace(setting(samples_per_gpu=128), slow_ranks=(0.6,), jitter=0.0)
    blind = predict(slow, replace(EVERYTHING, balancer="kk_equal"), num_ranks=16, num_steps=12, plan_steps=6)
    knowing = predict(slow, EVERYTHING, num_ranks=16, num_steps=12, plan_steps=6)
    assert blind.straggler > 0.25
    assert knowing.straggler < 0.07


def test_failures_cost_tokens_and_dollars() -> None:
    sure = predict(setting(), EVERYTHING, num_ranks=8, num_steps=12, plan_steps=4)
    unsure = predict(
        setting(), EVERYTHING, num_ranks=8, num_steps=12, plan_steps=4, failures=Failures(mtbf_hours=100.0)
    )
    # 25 minutes lost every 12.5 hours.
    assert unsure.tokens_per_s == pytest.approx(sure.tokens_per_s / (1 + 25 / 60 / 12.5))
    assert unsure.cost_per_billion > sure.cost_per_billion


def test_a_gpu_with_faster_memory_computes_faster() -> None:
    profiled = profiled_cluster(setting())
    assert profiled.profiled_on == load_cluster("h200")
    assert profiled.scale() > 1
    assert profiled_cluster(replace(setting(), cluster=load_cluster("h200"))).scale() == pytest.approx(1)
    assert profiled_cluster(replace(setting(), cluster=load_cluster("b200"))).scale() < 0.6


def test_contention_is_part_of_the_compute() -> None:
    where, features = setting(), replace(EVERYTHING, sm_free=False)
    loads = plan(where, features, num_ranks=8, plan_steps=4)
    made = measure_out(where, loads, features, num_ranks=8, num_steps=4)
    free = measure_out(where, loads, EVERYTHING, num_ranks=8, num_steps=4)
    np.testing.assert_allclose(made.compute - made.contention, free.compute - free.contention)
    assert (made.contention > free.contention).all()


@pytest.mark.parametrize(
    "key", [key for key in known_keys() if key not in ("workload.lengths", "features.balancer")]
)
def test_every_key_can_be_read_and_set(key: str) -> None:
    value = value_of(setting(), EVERYTHING, key)
    again = changed(setting(), EVERYTHING, key, str(value).lower() if isinstance(value, bool) else value)
    assert value_of(*again, key) == value


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cluster.nic_gb_s", "5", "did you mean cluster.nic_gb_per_s"),
        ("cluster.nic_gb_per_s", "-5", "must be above 0"),
        ("workload.samples_per_gpu", "0", "must be at least 1"),
        ("features.balancer", "best", "allowed: random, kk_equal, freescale"),
        ("features.sm_free", "maybe", "must be true or false"),
        ("setting.jitter", "lots", "must be a number"),
    ],
)
def test_bad_changes_say_what_is_allowed(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(setting(), EVERYTHING, key, value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "lengths", [
        "lognormal:512", "pareto:0,1,9", "fixed:x", "fixed:-3", "fixed:0", "fixed:nan", "fixed:1,2,3",
        "lognormal:9,nan,9", "nothing-here",
    ],
)  # fmt: skip
def test_lengths_that_cannot_be_drawn(lengths: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        draw_lengths(Workload(lengths=lengths), 10, seed=0)
    assert "allowed" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3\n-7\n5\n", "length 2 of 3 is -7"),
        ("3\nmany\n", "'many'"),
        ("1 2\n3 4\n", "2 x 2 numbers"),
        ("1.5\n", "1.5"),
        ("", "is empty"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_file_of_lengths_says_which_one_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        draw_lengths(Workload(lengths=str(path)), 10, seed=0)
    assert said in str(caught.value.got)
    assert "one whole number" in str(caught.value.allowed)
    assert "freescale prepare" not in str(caught.value)


def test_arrays_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    for wrong in (np.ones(3), np.array([4, -1]), np.ones((2, 2), dtype=np.int64)):
        np.save(path, wrong)
        with pytest.raises(DataError, match="cannot be used"):
            draw_lengths(Workload(lengths=str(path)), 10, seed=0)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be used"):
        draw_lengths(Workload(lengths=str(path)), 10, seed=0)
    np.save(path, np.array([4, 0]))
    assert set(draw_lengths(Workload(lengths=str(path)), 50, seed=0)) == {1, 4}


def test_an_answer_names_what_moves_it_and_what_to_trust() -> None:
    answer = simulate_answer(
        setting(), [4, 8], sweep=("cluster.nic_gb_per_s", ["25", "50"]), num_steps=12, with_sensitivity=False
    )
    assert [one.gpus for one in answer.ladder] == [4] * 8 + [8] * 8
    assert answer.sweep is not None
    assert len(answer.sweep.predictions) == 2
    assert short_names([one.features for one in answer.ladder[:8]]) == [
        "all off", "KK-equal", "balance", "+ prioritized", "+ dedup", "+ SM-free", "+ even owners", "+ postpone",
    ]  # fmt: skip
    assert short_names([one.features for one in answer.ablation])[0] == "without balance"
    assert any(mark.state == "extrapolated" for mark in answer.marks)
    moved = influences(
        setting(), EVERYTHING, num_ranks=4, keys=("setting.jitter", "cluster.latency_us"), num_steps=8
    )
    assert moved[0].swing >= moved[1].swing
    assert moved[0].source


@pytest.mark.parametrize("prioritized", [True, False])
def test_hiding_takes_from_cpu_ranks_what_was_measured(prioritized: bool) -> None:
    small = Workload(samples_per_gpu=6, lengths="lognormal:100,1.0,500", table_rows=20_000)
    features = Features(prioritized=prioritized, sm_free=False)
    means = []
    for rates in ({}, {"hiding_ms": 4.0}, {"hiding_ms": 4.0, "hiding_us_per_id": 1.0}):
        profile = load_profile("cpu-aarch64")
        known = {name: rate for name, rate in profile.rates.items() if not name.startswith("hiding")}
        where = Setting(small, replace(profile, rates={**known, **rates}), load_cluster("cpu"), jitter=0.0)
        loads = plan(where, features, num_ranks=2, plan_steps=4)
        made = measure_out(where, loads, features, num_ranks=2, num_steps=4)
        means.append(1000 * float(made.compute.mean()))
        asked = float((loads.tokens * small.ids_per_token + loads.samples * small.ids_per_sample).mean())
    nothing, fixed, both = means
    assert fixed - nothing == pytest.approx(4.0 if prioritized else 0.0)
    assert both - fixed == pytest.approx(1e-3 * asked if prioritized else 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_the_urgent_chain_of_cpu_ranks_computes_falls_beside_the_sum_of_dense_gradients(
    ranks: int,
) -> None:
    """It begins when the model is through, so none of it is taken from the model; the sum beside it takes longer."""
    small = Workload(samples_per_gpu=6, lengths="lognormal:100,1.0,500", table_rows=20_000)
    where = Setting(
        small, load_profile("cpu-aarch64"), load_cluster("cpu"), jitter=0.0, weights_share=0.1, cost_error=0.0
    )
    whole, parts = (
        simulate_features(
            where, Features(postpone=postpone, sm_free=False), num_ranks=ranks, num_steps=6, plan_steps=4
        )
        for postpone in (False, True)
    )
    before, after = whole.durations, parts.durations
    np.testing.assert_allclose(after.compute + after.weights, before.compute)
    chain = before.gather_late + before.update_urgent
    assert (chain > 0).all()
    np.testing.assert_allclose(after.gather_late + after.update_urgent, chain)
    np.testing.assert_allclose(after.dense_last - before.dense_last, chain)
    np.testing.assert_allclose(after.dense_total - before.dense_total, chain)
    # Where the training thread waits meanwhile it is compute all the same: some thread of the rank works.
    model = (after.compute + after.weights + after.optimizer)[1:-1].mean()
    computed = parts.outcome.accounts.compute[1:-1].mean()
    assert model - 1e-12 <= computed <= model + chain[1:-1].mean() + 1e-12


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_dense_sums_of_a_split_backward_are_waited_for_where_a_run_does(device: str) -> None:
    """GPUs leave them to the next forward, which is longer here; CPU ranks of a machine wait at the end of a step."""
    where = setting(lengths="fixed:400", samples_per_gpu=64, dense_bytes=2e8, bucket_bytes=1e8)
    if device == "cpu":
        where = replace(where, profile=load_profile("cpu-aarch64"), cluster=load_cluster("cpu"))
    where = replace(where, jitter=0.0, cost_error=0.0)
    made = simulate_features(where, Features(postpone=True), num_ranks=8, num_steps=8, plan_steps=4)
    d, total = made.durations, made.outcome.accounts.total
    alone = d.control + d.host + d.compute + d.weights + d.optimizer
    waited = (total - alone)[2:-1]
    if device == "cpu":
        assert (waited >= 0.99 * d.dense_last[2:-1]).all()
    else:
        assert (d.dense_last > 0.02 * alone).all()
        assert (d.dense_total < 0.5 * d.forward).all()
        assert waited.max() < 0.01 * d.dense_last.min()
        # The last step waits for its own sums.
        assert (total - alone)[-1].min() > 0.99 * d.dense_last.max()


@pytest.mark.parametrize("postpone", [False, True])
def test_bytes_between_cpu_ranks_beyond_two_take_what_was_measured_of_four(postpone: bool) -> None:
    """Ranks that share cores copy more slowly, and a sum over more than two travels twice."""
    small = Workload(samples_per_gpu=6, lengths="lognormal:100,1.0,500", table_rows=20_000, dense_bytes=4e5)
    profile = load_profile("cpu-aarch64")
    more = {"sum_s_per_gb_per_rank": 2.0, "exchange_s_per_gb_per_rank": 1.0}
    features = Features(sm_free=False, postpone=postpone)
    for ranks, added in ((2, 0.0), (4, 2.0)):
        before, after = (
            measure_out(
                where,
                plan(where, features, num_ranks=ranks, plan_steps=2),
                features,
                num_ranks=ranks,
                num_steps=2,
            )
            for where in (
                Setting(
                    small,
                    replace(profile, rates={**profile.rates, **rates}),
                    load_cluster("cpu"),
                    jitter=0.0,
                    weights_share=0.1,
                )
                for rates in ({}, more)
            )
        )
        np.testing.assert_allclose(
            after.dense_total - before.dense_total, 2.0 * added * 4e5 * 1e-9, atol=1e-12
        )
        moved = (after.rows - before.rows) * 1e9 / (ranks - 1) * ranks
        assert (moved > 0).all() if added else np.allclose(moved, 0.0)


@pytest.mark.parametrize("prioritized", [False, True])
def test_rows_stored_in_half_travel_in_half_and_their_gradients_do_not(prioritized: bool) -> None:
    whole, half = setting(), setting(stored_share=0.5)
    features = Features(prioritized=prioritized)
    loads = plan(whole, features, num_ranks=16, plan_steps=2)
    before, after = (measure_out(one, loads, features, num_ranks=16, num_steps=2) for one in (whole, half))
    for rows, grads in (("rows", "grads"), ("late_rows", "urgent_grads")):
        assert (getattr(after, rows) < getattr(before, rows)).all()
        np.testing.assert_array_equal(getattr(after, grads), getattr(before, grads))
    assert (after.early_rows < before.early_rows).all()
    np.testing.assert_array_equal(after.parked_grads, before.parked_grads)
    moved = float(moved_rows(whole.workload, loads, dedup=True, num_ranks=16).moved.mean())
    ids = 0.0 if prioritized else 8 * 2 * 15 / 16 * moved
    assert after.exposed_bytes - ids == pytest.approx(0.75 * (before.exposed_bytes - ids))
    # So much less stands in the way that a step is never longer for it.
    ends = [end_of(one, features, ranks=16).max() for one in (whole, half)]
    assert ends[1] < ends[0]


@pytest.mark.parametrize("hides", [False, True])
def test_ranks_that_share_a_gpu_talk_at_the_speed_of_their_profile(hides: bool) -> None:
    rates = {
        "exchange_gb_per_s": 10.0,
        "exchange_us": 200.0,
        "sum_gb_per_s": 5.0,
        "sum_us": 300.0,
        "control_us": 0.0,
    }
    alone = setting()
    shared = replace(alone, profile=replace(alone.profile, shared_by=4, rates=rates))
    features = Features(prioritized=hides)

    def end(where: Setting) -> float:
        return float(end_of(where, features, ranks=4).max())

    assert end(shared) > end(alone)
    # What the cluster has between its GPUs does not matter, what was measured between the ranks does.
    assert end(
        replace(shared, cluster=replace(shared.cluster, nvlink_gb_per_s=1.0, nic_gb_per_s=1.0))
    ) == end(shared)
    for name, value in (("exchange_gb_per_s", 1.0), ("exchange_us", 900.0), ("sum_us", 9000.0)):
        slower = replace(shared.profile, rates={**rates, name: value})
        assert end(replace(shared, profile=slower)) > end(shared)


@pytest.mark.parametrize("hides", [False, True])
def test_the_host_of_the_hiding_schedule_has_a_time_of_its_own(hides: bool) -> None:
    plain = setting()
    times = {**plain.profile.times, "host_hiding": Timing(fixed_ms=50.0)}
    other = replace(plain, profile=replace(plain.profile, times=times))
    ends = [float(end_of(where, Features(prioritized=hides), ranks=4).max()) for where in (plain, other)]
    assert (ends[1] > ends[0]) is hides


@pytest.mark.parametrize("per_rank", [0.0, 150.0, 900.0])
def test_exchanges_of_two_cpu_ranks_take_what_was_measured_of_two(per_rank: float) -> None:
    """However much each further rank adds: four that share two cores can add more than two take in all."""
    profile = load_profile("cpu-aarch64")
    rates = {**profile.rates, "exchange_us": 200.0, "exchange_us_per_rank": per_rank}
    small = Workload(samples_per_gpu=6, lengths="lognormal:100,1.0,500", table_rows=20_000)
    where = Setting(small, replace(profile, rates=rates), load_cluster("cpu"), jitter=0.0)
    features = Features(sm_free=False, prioritized=False)
    for ranks in (2, 4):
        loads = plan(where, features, num_ranks=ranks, plan_steps=2)
        made = measure_out(where, loads, features, num_ranks=ranks, num_steps=2)
        np.testing.assert_allclose(made.counts.max(), 1e-6 * (200.0 + (ranks - 2) * per_rank), rtol=0.05)
