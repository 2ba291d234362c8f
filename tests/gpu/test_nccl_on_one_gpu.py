"""NCCL between ranks that share a GPU under MPS: what the plain transport and the prioritized pipeline do with it.

Needs NCCL 2.30 or later, loaded before torch's own: LD_PRELOAD=libnccl.so.2 pytest tests/gpu/test_nccl_on_one_gpu.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.traffic.channels import open_channels
from freescale.comm.transports.registry import make_transport
from freescale.comm.world.nccl_trial import try_shared_nccl
from freescale.comm.world.shared_gpu.nccl import no_shared_nccl
from freescale.comm.world.shared_gpu.shares import virtual_gpus
from tests.gpu.killing import kill_rank_1
from tests.gpu.test_sm_free_transport import GPU, check, prioritized_bits, rows_for, run_on_gpu
from tests.small_run import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and no_shared_nccl() is not None,
        reason=f"NCCL: {no_shared_nccl() if torch.cuda.is_available() else 'no GPU'}",
    ),
]


@pytest.fixture(params=[2, 4], ids=lambda count: f"{count} ranks")
def sharing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Ranks that are started inside share the GPU side by side."""
    with virtual_gpus(request.param) as shared:
        if not shared.partitioned:
            pytest.skip("needs CUDA MPS")
        for name, value in shared.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("FREESCALE_SHARED_NCCL", "1")  # four are more than have it by themselves
        yield request.param


def exchange_many(rank: int, num_ranks: int, num_exchanges: int, most: int) -> int:
    """Random uneven splits, many of them empty, several exchanges in flight, compute beside them."""
    transport: Any = make_transport(dist.group.WORLD, device=GPU, kind="collective", timeout_s=60)
    assert (transport.engine, transport.sm_free) == ("nccl", False)
    matrix = torch.randn(512, 512, device=GPU)
    rng, on_the_way, moved = random.Random(11), [], 0
    for number in range(num_exchanges):
        limit = rng.choice([0, 1, 50, most])
        counts = [
            [rng.choice([0, rng.randint(0, limit)]) for _ in range(num_ranks)] for _ in range(num_ranks)
        ]
        send, receive = counts[rank], [row[rank] for row in counts]
        rows = torch.cat([rows_for(number, rank, target, send[target]) for target in range(num_ranks)])
        pending = transport.start(rows, send=send, receive=receive)
        del rows
        matrix = (matrix @ matrix).clamp(-1, 1)
        on_the_way.append((number, receive, pending))
        moved += sum(receive)
        if len(on_the_way) > 3:
            check(rank, *on_the_way.pop(0))
    for each in on_the_way:
        check(rank, *each)
    torch.cuda.synchronize()
    return moved


def test_rows_arrive_whatever_the_splits(sharing: int) -> None:
    assert min(run_on_gpu(exchange_many, sharing, sharing, 300, 3000)) > 0


def channels_at_once(rank: int, num_ranks: int) -> bool:
    """Three communicators, used by two threads in turn as a pipeline does: every rank in the same order."""
    channels = open_channels(dist.group.WORLD, device=GPU, kind="collective", timeout_s=60)
    counts = [4096] * num_ranks
    right = True
    for number in range(60):
        rows = torch.full((sum(counts), 16), float(100 * number + rank), device=GPU)
        pending = [
            each.start(rows, send=counts, receive=counts) for each in (channels.bulk, channels.express)
        ]
        torch.mm(rows[:1024, :].T.contiguous(), rows[:1024])
        for each in reversed(pending):
            wanted = torch.arange(num_ranks, device=GPU).repeat_interleave(4096) + 100.0 * number
            right &= bool((each.wait()[:, 0] == wanted).all())
    torch.cuda.synchronize()
    return right


def test_channels_of_a_pipeline_do_not_wait_for_each_other(sharing: int) -> None:
    assert run_on_gpu(channels_at_once, sharing, sharing) == [True] * sharing


def test_prioritized_training_has_the_bits_of_the_plain_path(sharing: int) -> None:
    assert run_on_gpu(prioritized_bits, sharing, "collective") == [True] * sharing


def large_message(rank: int, num_ranks: int) -> bool:
    """More than 2 GiB to one rank, nothing to the others."""
    transport = make_transport(dist.group.WORLD, device=GPU, kind="collective", timeout_s=60)
    count = (2 << 30) // 4 + 1024
    send = [count if (rank, target) == (0, 1) else 0 for target in range(num_ranks)]
    receive = [count if (source, rank) == (0, 1) else 0 for source in range(num_ranks)]
    values = torch.arange(sum(send), dtype=torch.int32, device=GPU)
    got = transport.start(values, send=send, receive=receive).wait()
    places = torch.tensor([0, 12345, count // 2, count - 1], device=GPU)
    return rank != 1 or torch.equal(got[places], places.int())


@pytest.mark.parametrize("sharing", [2], indirect=True)
def test_more_than_two_gibibytes_arrive(sharing: int) -> None:
    assert run_on_gpu(large_message, sharing, sharing) == [True] * sharing


def test_a_try_says_that_it_works() -> None:
    works, told = try_shared_nccl()
    assert works, told
    assert told.startswith("yes: two ranks of one GPU")


def test_a_killed_rank_is_named_within_ten_seconds(tmp_path: Path) -> None:
    """Of a whole training over NCCL, whose kernels wait for the dead rank without an end."""
    out = tmp_path / "run"
    keys = (*SMALL, "run.device=cuda", "run.steps=100000", "run.eval_every=0", "comm.transport=collective")
    ended = kill_rank_1((*keys, "--virtual-gpus", "2"), out, behind=40)
    assert ended.seconds < 10 + 5  # the MPS daemon is ended, too
    assert "rank 1 was killed by SIGKILL" in ended.said
    assert ended.code != 0
