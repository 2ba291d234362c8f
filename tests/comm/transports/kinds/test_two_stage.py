"""Two stages bring what one stage brings, in the same order, with fewer messages; and no rank waits in vain."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from freescale.comm import exchange_counts
from freescale.comm.traffic.channels import open_channels, open_ids_channel
from freescale.comm.traffic.deterministic_all_reduce import start_all_reduce
from freescale.comm.traffic.routing import ask_owners, send_keys
from freescale.comm.transports import registry
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.kinds.two_stage import TwoStageRoute, TwoStageTransport
from freescale.comm.transports.registry import kind_for_ids
from freescale.comm.transports.traced import TracedTransport
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.embedding import Adam, TableSpec, exchange_all_ids, find_overlaps
from freescale.embedding.sharding.plan import TablePlan
from freescale.errors import TrainingError
from tests.ranks import run_on_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
# In rank order, dealt out in turn, and so that nodes stand in another order for each number.
NODES = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0], [1], [2]], [[0, 1, 2]]]


def same_as_one_stage(rank: int, nodes: list[list[int]]) -> None:
    two, one = TwoStageTransport(dist.group.WORLD, nodes), CollectiveTransport(dist.group.WORLD)
    assert (two.rank, two.num_ranks) == (rank, one.num_ranks)
    rng, on_the_way = random.Random(3), []
    for _ in range(20):
        dtype, width = rng.choice(DTYPES), rng.choice([(), (1,), (64,), (2, 3), (0,)])
        most = rng.choice([0, 1, 5, 3000])
        counts = [[rng.randint(0, most) for _ in range(two.num_ranks)] for _ in range(two.num_ranks)]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.randint(-99, 99, (sum(send), *width)).to(dtype)
        assert exchange_counts(two, torch.tensor(send)).tolist() == receive
        wanted = one.start(rows, send=send, receive=receive).wait()
        if rows.shape[1:].numel():
            (told, twice), heard = two.exchange_unsized([rows, rows * 2], send=[send, send])
            assert heard == [receive, receive]
            assert torch.equal(told, wanted)
            assert torch.equal(twice, wanted * 2)
        on_the_way.append((two.start(rows, send=send, receive=receive), wanted))
        rng.shuffle(on_the_way)
        while on_the_way and rng.random() < 0.5:
            pending, wanted = on_the_way.pop()
            assert torch.equal(pending.wait(), wanted)
    for pending, wanted in on_the_way:
        assert torch.equal(pending.wait(), wanted)


@pytest.mark.parametrize("nodes", NODES[1:4], ids=str)
def test_it_brings_what_one_stage_brings(nodes: list[list[int]]) -> None:
    run_on_ranks(same_as_one_stage, sum(map(len, nodes)), nodes)


def plans_of(sizes: list[int], num_ranks: int) -> list[TablePlan]:
    specs = [TableSpec(name=f"t{n}", num_rows=size, dim=4, optimizer=Adam()) for n, size in enumerate(sizes)]
    return [TablePlan(spec=spec, num_ranks=num_ranks, replicated=False) for spec in specs]


def ask_both_ways(rank: int, nodes: list[list[int]], examples: list[Any]) -> int:
    """What two batches ask of several tables, by one stage and by two: every tensor and every count is the same."""
    one: Any = CollectiveTransport(dist.group.WORLD)
    two: Any = TracedTransport(TwoStageTransport(dist.group.WORLD, nodes))
    for sizes, of_ranks in examples:
        plans = plans_of(sizes, one.num_ranks)
        asked = [[torch.tensor(ids, dtype=torch.int64) for ids in batch] for batch in of_ranks[rank]]
        told = []
        for channel in (one, two):
            before, after = (exchange_all_ids(plans, rows, channel=channel) for rows in asked)
            marks = find_overlaps(list(zip(before, after)), channel=channel)
            requests = [*before, *after]
            told.append(
                (
                    [(each.route.send, each.route.receive, each.route.largest) for each in requests],
                    [tensor.tolist() for each in requests for tensor in (each.unique, *each.owned.tensors())],
                    [(mark.asked.tolist(), mark.owned.tolist()) for pair in marks for mark in pair],
                )
            )
        assert told[0] == told[1]
        keys = torch.unique(asked[0][0])
        how: Any = {"owner": lambda ids: ids % one.num_ranks, "answer": lambda ids: 3 * ids + rank}
        assert torch.equal(ask_owners(keys, channel=one, **how), ask_owners(keys, channel=two, **how))
    return int(two.num_messages)


def draw(seed: int, num_ranks: int) -> tuple[list[int], list[Any]]:
    """Sizes of tables, and ids by rank, batch and table: many, few or none."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 7, 40, 1000]) for _ in range(rng.randint(1, 3))]
    return sizes, [
        [
            [[rng.randrange(size) for _ in range(rng.choice([0, 0, 1, 9, 200]))] for size in sizes]
            for _ in "ab"
        ]
        for _ in range(num_ranks)
    ]


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(NODES), st.lists(st.integers(0, 10_000), min_size=8, max_size=8))
@example(NODES[0], list(range(8)))
@example(NODES[2], list(range(8)))
def test_owners_hear_the_same_ids_in_the_same_order(nodes: list[list[int]], seeds: list[int]) -> None:
    num_ranks = sum(map(len, nodes))
    run_on_ranks(ask_both_ways, num_ranks, nodes, [draw(seed, num_ranks) for seed in seeds])


def steady_messages(rank: int) -> tuple[int, int]:
    """Messages of a rank for ten batches whose sizes vary by a tenth, after a first one; and at a jump."""
    channel = TwoStageTransport(dist.group.WORLD, [[0, 1], [2, 3]])
    plans, rng = plans_of([100_000], 4), torch.Generator().manual_seed(rank)

    def batch(count: int) -> None:
        send_keys(
            [torch.randperm(100_000, generator=rng)[:count].sort().values],
            [torch.tensor(plans[0].edges())],
            channel=channel,
        )

    batch(1100)
    before = channel.num_messages
    for number in range(10):
        batch(1000 + 100 * (number % 2))
    steady = channel.num_messages - before
    batch(9000)
    return steady, channel.num_messages - before - steady


def test_a_steady_exchange_is_one_message_a_peer_and_a_jump_two() -> None:
    for steady, jump in run_on_ranks(steady_messages, 4):
        assert steady == 10 * 2
        assert jump == 2 * 2


def sums(rank: int) -> list[bytes]:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    ways = [TwoStageTransport(dist.group.WORLD, NODES[1]), CollectiveTransport(dist.group.WORLD)]
    pending = [start_all_reduce(way, part) for way in ways for part in (values, values[:3])]
    return [each.wait().numpy().tobytes() for each in pending]


def test_sums_have_the_same_bits() -> None:
    first, *others = run_on_ranks(sums, 4)
    assert all(other == first for other in others)
    assert first[:2] == first[2:]


def start_and_leave(rank: int) -> float:
    transport = TwoStageTransport(dist.group.WORLD, [[0, 1], [2, 3]])
    pending = transport.start(torch.full((4, 3), float(rank)), send=[1] * 4, receive=[1] * 4)
    if rank == 0:
        pending.wait()
    dist.barrier()
    return float(pending.wait().sum())


def test_a_rank_busy_elsewhere_holds_nobody_up() -> None:
    assert run_on_ranks(start_and_leave, 4, timeout=30) == [18.0] * 4


def lose_one(rank: int, folder: str, pipe: Any) -> None:
    """Rank 3 of two nodes is killed; the others tell how they ended. The time-out is far away."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    transport = TwoStageTransport(dist.group.WORLD, [[0, 1], [2, 3]], timeout_s=100)
    try:
        for number in range(1000):
            exchange_counts(transport, torch.ones(4, dtype=torch.int64))
            if (rank, number) == (3, 2):
                os.kill(os.getpid(), signal.SIGKILL)
    except (ConnectionError, RuntimeError) as error:
        again = "went on"
        try:
            exchange_counts(transport, torch.ones(4, dtype=torch.int64))
        except (ConnectionError, RuntimeError) as second:
            again = str(second)
        pipe.send((rank, str(error), again == str(error)))
    os._exit(1)


def test_a_killed_rank_ends_the_exchange_of_all_and_is_named_in_its_node(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    ranks = [context.Process(target=lose_one, args=(rank, str(tmp_path), send)) for rank in range(4)]
    for process in ranks:
        process.start()
    send.close()
    try:
        said = {}
        while len(said) < 3:
            assert receive.poll(30), f"only ranks {sorted(said)} have heard of it"
            rank, text, stays = receive.recv()
            assert stays, "what has failed once fails again"
            said[rank] = text
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert sorted(said) == [0, 1, 2]
    assert "rank 3 has closed its connection" in said[2]


def wait_in_vain(rank: int) -> str:
    transport = TwoStageTransport(dist.group.WORLD, [[0, 1]], timeout_s=0.3)
    exchange_counts(transport, torch.ones(2, dtype=torch.int64))
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(TimeoutError) as caught:
        exchange_counts(transport, torch.ones(2, dtype=torch.int64))
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    assert "ranks [1] did not exchange rows within 0 s" in run_on_ranks(wait_in_vain, 2, timeout=30)[0]


def disagree(rank: int) -> str:
    transport = TwoStageTransport(dist.group.WORLD, [[0], [1]])
    with pytest.raises(TrainingError) as caught:
        transport.start(torch.ones(2), send=[1, 1], receive=[2, 2] if rank else [1, 2]).wait()
    return str(caught.value)


def test_sizes_nobody_agreed_on_are_refused() -> None:
    first, second = run_on_ranks(disagree, 2)
    assert "rank 1 has sent rank 0 1 rows, not 2" in first
    assert "rank 0 has sent rank 1 1 rows, not 2" in second


def facts(*nodes: int, device: str = "cpu", machine: str = "m") -> GroupFacts:
    ranks = [RankFacts(machine, pid, "p", node=node) for pid, node in enumerate(nodes)]
    return GroupFacts(ranks, 0, torch.device(device), "gloo")


def test_who_can_use_it() -> None:
    assert facts(0, 0, 1, 1).nodes == [[0, 1], [2, 3]]
    assert facts(1, 0, 1, 0).nodes == [[0, 2], [1, 3]]
    assert TwoStageRoute.why_not(facts(0, 0, 1, 1)) is None
    assert "nodes have 1 to 2 ranks" in (TwoStageRoute.why_not(facts(0, 0, 1)) or "")
    assert "CPU tensors only" in (TwoStageRoute.why_not(facts(0, 1, device="cuda")) or "")


def choose(rank: int, local: int, kind: str, ids: str, fewest: int = 2) -> tuple[str, str]:
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    registry.FEWEST_FOR_TWO_STAGES = fewest  # this process is a rank's own
    cpu = torch.device("cpu")
    name, _ = kind_for_ids(dist.group.WORLD, kind, device=cpu, ids=ids)
    channels = open_channels(dist.group.WORLD, kind=kind, ids=ids)
    assert (channels.ids is channels.bulk) == (name == channels.bulk.name)
    opened = open_ids_channel(dist.group.WORLD, kind=kind, ids=ids)
    assert opened.name == name == channels.ids.name
    return name, opened.reason


def test_auto_takes_it_between_nodes_and_says_why() -> None:
    name, reason = run_on_ranks(choose, 4, 2, "auto", "auto")[0]
    assert name == "two_stage"
    assert reason == (
        "auto: the ranks are on 2 nodes; 2 nodes of 2: 1 messages between nodes and 1 inside for each exchange of a "
        "rank, not 3"
    )
    name, reason = run_on_ranks(choose, 2, 2, "auto", "auto")[0]
    assert (name, "not two_stage: the ranks are on one node" in reason) == ("local", True)
    name, reason = run_on_ranks(choose, 2, 1, "auto", "auto", 3)[0]
    assert (name, "not two_stage: it pays from 3 ranks on" in reason) == ("collective", True)
    name, reason = run_on_ranks(choose, 3, 2, "collective", "auto")[0]
    assert (name, "not two_stage: nodes have 1 to 2 ranks" in reason) == ("collective", True)
    name, reason = run_on_ranks(choose, 2, 1, "auto", "collective")[0]
    assert (name, reason.startswith("as the recipe says")) == ("collective", True)
