"""Ranks: sums, agreements, devices, and joining a run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world.launcher import CPU_THREADS
from freescale.comm.world.ranks import Ranks, join_ranks, pick_device, world_size_from_environment
from freescale.errors import FreeScaleError, TrainingError
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks


def test_alone_nothing_is_exchanged():
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"))
    values = torch.tensor([1.0, 2.0])
    assert ranks.sum(values) is values
    assert ranks.sum_on_cpu(values).tolist() == [1, 2]
    ranks.barrier()
    ranks.agree({"anything": 1}, subject="nothing")
    assert ranks.is_first


def add_up(rank: int) -> list[object]:
    ranks = these_ranks()
    ranks.barrier()
    sums = ranks.sum(torch.tensor([1, rank, 10**rank])).tolist()
    return [ranks.is_first, sums, float(ranks.sum_on_cpu(torch.tensor(0.25 * rank)))]


def test_sums_reach_every_rank():
    for rank, (is_first, sums, total) in enumerate(run_on_ranks(add_up, 3)):
        assert is_first == (rank == 0)
        assert sums == [3, 3, 111]
        assert total == 0.75


def disagree(rank: int) -> list[str]:
    ranks = these_ranks()
    ranks.agree({"a": 1, "b": [1, 2], "c": None}, subject="the run")
    messages = []
    for mine, other in (({"rows": 5}, {"rows": 6}), ({}, {"extra": 1}), ({"t": [1, 2]}, {"t": [1, 3]})):
        with pytest.raises(FreeScaleError) as caught:
            ranks.agree({"same": 0, **(other if rank == 2 else mine)}, subject="table shapes")
        messages.append(str(caught.value))
    return messages


def test_disagreement_is_told_on_every_rank_with_rank_and_values():
    results = run_on_ranks(disagree, 3)
    assert results[0] == results[1] == results[2]
    rows, extra, lists = results[0]
    assert "ranks disagree on table shapes: rank 2 differs from rank 0 in rows" in rows
    assert "rank 0: 5, rank 2: 6" in rows
    assert "in extra" in extra
    assert "rank 0: [1, 2], rank 2: [1, 3]" in lists


def test_the_device_is_what_was_asked_for(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(TrainingError, match="no usable CUDA device") as caught:
        pick_device("cuda")
    assert "run.device=cpu" in str(caught.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert pick_device("cpu", local_rank=1) == torch.device("cpu")
    with pytest.raises(TrainingError, match="more ranks on this machine than GPUs"):
        pick_device("cuda", local_rank=2)


def test_without_an_environment_a_run_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert world_size_from_environment() == 1
    with join_ranks(device="cpu") as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.group, ranks.control) == (0, 1, None, None)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "chosen", "threads"), [("cuda", True, 1), ("cuda", False, 3), ("cpu", True, 3)]
)
def test_the_host_of_a_gpu_has_one_thread_unless_the_user_wants_more(device, chosen, threads, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(CPU_THREADS, raising=False)
    if chosen:
        monkeypatch.setenv(CPU_THREADS, "1")
    monkeypatch.setattr("freescale.comm.world.ranks.pick_device", lambda *_, **__: torch.device(device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def nobody_there(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(dist, "init_process_group", nobody_there)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ConnectionError), join_ranks(device=device):
            pass
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
