"""Ranks: sums, agreements, devices, and joining a run."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world.facts import RankFacts
from freescale.comm.world.joining import join_ranks
from freescale.comm.world.launcher import CPU_THREADS
from freescale.comm.world.meeting.network import free_port
from freescale.comm.world.ranks import Ranks, pick_device, refuse_shared_gpu
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


@pytest.mark.parametrize("visible", [1, 2])
def test_a_rank_that_sees_its_own_gpus_alone_takes_one_of_them(visible, monkeypatch):
    """Slurm with --gpus-per-task: the GPUs of every task are numbered from 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert pick_device("cuda", local_rank=3) == torch.device("cuda", 3 % visible)


def on_gpus(*gpus: str) -> list[RankFacts]:
    return [RankFacts("m", rank, "p", gpu, host=f"node-{rank}") for rank, gpu in enumerate(gpus)]


def test_two_ranks_on_one_gpu_are_refused_by_their_numbers():
    refuse_shared_gpu(on_gpus("GPU-a", "GPU-b", "GPU-c"))
    refuse_shared_gpu(on_gpus("", "", ""))
    with pytest.raises(TrainingError, match="ranks 1 and 3 would compute on one GPU") as caught:
        refuse_shared_gpu(on_gpus("GPU-a", "GPU-b", "GPU-c", "GPU-b"))
    assert "GPU-b on node-3" in str(caught.value)
    assert "--virtual-gpus" in str(caught.value)


class OneGpu:
    """As much of torch.cuda as joining asks for, where every process sees one GPU."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def install(self) -> None:
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.set_device = lambda device: None
        torch.cuda.get_device_properties = lambda index: self


def join_with_gpus(rank: int, uuids: list[str], port: int) -> str:
    dist.barrier()  # the other may not have all its connections yet
    dist.destroy_process_group()
    OneGpu(uuids[rank]).install()
    # No GPU here: what NCCL would serve is left out.
    start = dist.init_process_group
    dist.init_process_group = lambda backend, **how: start("gloo", **how)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    said = "joined"
    try:
        with join_ranks(device="cuda", timeout_s=30) as ranks:
            said += f" {ranks.device}"
    except TrainingError as error:
        said = error.what
    again = dist.HashStore()
    start("gloo", store=dist.PrefixStore(str(rank), again), rank=0, world_size=1)
    return said


@pytest.mark.timed  # somebody else may take the free port
def test_ranks_with_one_visible_gpu_each_join():
    """Failed before: local rank 1 was refused, as if it had to be GPU 1 that it takes."""
    assert run_on_ranks(join_with_gpus, 2, ["GPU-a", "GPU-b"], free_port()) == ["joined cuda:0"] * 2


@pytest.mark.timed  # somebody else may take the free port
def test_ranks_that_see_the_same_gpu_are_refused_everywhere():
    for said in run_on_ranks(join_with_gpus, 2, ["GPU-a", "GPU-a"], free_port()):
        assert said.startswith("ranks 0 and 1 would compute on one GPU")


def test_without_an_environment_a_run_is_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with join_ranks(device="cpu") as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.group, ranks.control) == (0, 1, None, None)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "chosen", "threads"), [("cuda", True, 1), ("cuda", False, 3), ("cpu", True, 3)]
)
def test_the_host_of_a_gpu_has_one_thread_unless_the_user_wants_more(device, chosen, threads, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FREESCALE_RENDEZVOUS", "file:///nowhere")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # what joining puts there is put back
        monkeypatch.setenv(name, "1" if name == "LOCAL_WORLD_SIZE" else "0")
    monkeypatch.delenv(CPU_THREADS, raising=False)
    if chosen:
        monkeypatch.setenv(CPU_THREADS, "1")
    monkeypatch.setattr("freescale.comm.world.joining.pick_device", lambda *_, **__: torch.device(device))
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


@pytest.mark.parametrize("chosen", [None, "0"])
def test_communicators_start_their_kernels_in_the_order_of_the_calls_unless_told_otherwise(
    chosen, monkeypatch
):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FREESCALE_RENDEZVOUS", "file:///nowhere")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # what joining puts there is put back
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", chosen or "")
    if chosen is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    seen = []

    def join(*_: object, **__: object) -> None:
        seen.append(os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"])
        raise ConnectionError

    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(ConnectionError), join_ranks(device="cpu"):
        pass
    assert seen == [chosen or "1"]
