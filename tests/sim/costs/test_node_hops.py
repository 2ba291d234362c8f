"""Rows once a node in predictions: fewer rows and messages between nodes, a hop more, only where there are nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freescale.sim.answers.answer import simulate_answer
from freescale.sim.answers.keys import changed
from freescale.sim.answers.whatif import EVERYTHING, as_shipped, plan
from freescale.sim.costs.durations import Durations, measure_out
from freescale.sim.costs.id_traffic import IdModel
from freescale.sim.costs.links import Links
from freescale.sim.costs.moved_rows import moved_rows
from freescale.sim.costs.node_hops import NodeHops, can_hop
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import load_profile
from freescale.sim.inputs.workload import Workload

H100 = load_cluster("h100")
FEW = replace(EVERYTHING, postpone=False)
NODE = replace(FEW, node_dedup=True)


def setting() -> Setting:
    work = Workload(samples_per_gpu=8, lengths="lognormal:200,1.0,2000", table_rows=1_000_000)
    return Setting(workload=work, profile=load_profile("h200"), cluster=H100, jitter=0.0, cost_error=0.0)


def durations(features: Features, ranks: int) -> Durations:
    where = setting()
    loads = plan(where, features, num_ranks=ranks, plan_steps=3)
    return measure_out(where, loads, features, num_ranks=ranks, num_steps=3)


def test_a_node_asks_for_each_of_its_rows_once() -> None:
    where = setting()
    loads = plan(where, FEW, num_ranks=16, plan_steps=2)
    ranks, relays = (
        moved_rows(where.workload, loads, dedup=True, num_ranks=16, local=local) for local in (1, 8)
    )
    asked = ranks.asked.reshape(2, 2, 8).sum(2)
    expected = IdModel(1_000_000, 1.0).distinct(asked).sum(1)
    np.testing.assert_allclose(relays.moved.sum(1), expected, rtol=1e-3)
    assert relays.moved.sum() < 0.9 * ranks.moved.sum()
    # What the next batch needs, too, is more popular, and so more of it is asked for by several ranks.
    assert relays.shared.sum() / ranks.shared.sum() < relays.moved.sum() / ranks.moved.sum()
    np.testing.assert_allclose(relays.served.sum(1), relays.moved.sum(1))


def test_hops_have_messages_and_latencies_of_their_own() -> None:
    hops = NodeHops(H100, 256)
    nothing = np.array(0.0)
    assert float(hops.travel(nothing, nothing)) == hops.between.latency() + hops.inside.latency()
    # 31 messages of half_message_kb, not 248, and 31/32 of the bytes at the rate of the network.
    rate = 1e9 * H100.link_efficiency * H100.inter_gb_per_s()
    expected = hops.between.latency() + (10e6 * 31 / 32 + 31e3 * H100.half_message_kb) / rate
    assert float(hops.between.all_to_all(10e6)) == pytest.approx(expected)
    assert float(hops.travel(np.array(10e6), np.array(12e6))) < float(Links(H100, 256).all_to_all(12e6))
    counts, ids = hops.host_messages()
    assert counts == pytest.approx(1e-6 * (H100.latency_us + 7 * H100.inside_message_us))
    assert ids == pytest.approx(counts + hops.between.host_messages())


def test_many_nodes_wait_less_for_rows() -> None:
    rank, node = (durations(features, 128) for features in (FEW, NODE))
    assert node.network_bytes < rank.network_bytes
    assert node.exposed_bytes > rank.exposed_bytes  # some of it twice: inside the node and between nodes
    assert node.late_rows.mean() < rank.late_rows.mean()
    assert node.update_urgent.mean() < rank.update_urgent.mean()
    plain, by_node = (durations(replace(one, prioritized=False), 128) for one in (FEW, NODE))
    assert by_node.grads.mean() < plain.grads.mean()


def test_it_is_said_where_it_cannot_be() -> None:
    assert [can_hop(H100, ranks) for ranks in (8, 12, 16)] == [False, False, True]
    where, features = changed(setting(), FEW, "features.node_dedup", "true")
    assert as_shipped(where, features, 16).node_dedup
    assert not as_shipped(where, replace(features, dedup=False), 16).node_dedup
    assert not EVERYTHING.node_dedup
    inside = simulate_answer(where, [8], features=features, num_steps=6, with_sensitivity=False)
    assert not any(one.features.node_dedup for one in inside.ladder)
    assert any("Rows are asked for once a rank" in note for note in inside.notes)
    between = simulate_answer(where, [16], features=features, num_steps=6, with_sensitivity=False)
    *_, before, last = between.ladder
    assert last.features.words() == f"{before.features.words()} + node dedup"
    assert last.network_mb < before.network_mb
    assert any("node dedup has not run on a cluster" in note for note in between.notes)
