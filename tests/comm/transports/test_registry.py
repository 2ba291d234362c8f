"""What `auto` takes, and what is said where a named transport cannot be used."""

from __future__ import annotations

import pytest
import torch

from freescale.comm.rings import cuda_driver
from freescale.comm.transport import AloneTransport
from freescale.comm.transports import registry as choose
from freescale.comm.transports.registry import (
    ROUTES,
    describe_transport,
    make_transport,
    open_route,
    pick,
    survey,
)
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.errors import TrainingError


def facts(
    *gpus: str, device: str = "cuda", backend: str = "nccl", machines: str = "", reach: bool = True
) -> GroupFacts:
    machines = machines or "a" * len(gpus)
    seen = frozenset(gpus) if reach else frozenset[str]()
    ranks = [
        RankFacts(machine, pid, "pids", gpu, seen) for pid, (gpu, machine) in enumerate(zip(gpus, machines))
    ]
    return GroupFacts(ranks, 0, torch.device(device), backend)


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: object())


@pytest.mark.usefixtures("with_driver")
def test_auto_takes_what_the_group_can_use_and_says_why() -> None:
    assert pick(facts("", "", device="cpu", backend="gloo", machines="ab"))[0] == "collective"
    name, why = pick(facts("g0", "g1"))
    assert name == "collective"
    assert "nccl" in why
    name, why = pick(facts("g0", "g0", backend="gloo"))
    assert (name, "several ranks share one GPU" in why) == ("copy_engine", True)
    name, why = pick(facts("g0", "g0", "g1", backend="gloo", reach=False))
    assert name == "host_staged"
    assert "not copy_engine: the GPU of rank 0 cannot map memory of the GPU of rank 2" in why


def test_auto_says_what_speaks_against_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no libcuda")

    monkeypatch.setattr(cuda_driver, "load_library", missing)
    name, why = pick(facts("g0", "g0", backend="gloo"))
    assert name == "collective"
    assert "not copy_engine: the CUDA driver cannot be loaded (no libcuda)" in why
    assert "not host_staged: the CUDA driver cannot be loaded" in why


@pytest.mark.usefixtures("with_driver")
@pytest.mark.parametrize(
    ("name", "where", "reason"),
    [
        ("collective", facts("g0", "g0"), "NCCL takes one rank a GPU"),
        ("collective", facts("g0", "g1", backend="none"), "no backend for cuda tensors"),
        ("copy_engine", facts("", "", device="cpu", backend="gloo"), "these ranks compute on CPUs"),
        ("copy_engine", facts("g0", "g1", machines="ab"), "several machines"),
        ("copy_engine", facts("g0", "g1", reach=False), "cannot map memory"),
        ("host_staged", facts("", "", device="cpu", machines="ab"), "not on one Linux machine"),
        ("local", facts("", "", device="cpu", machines="ab"), "several machines"),
    ],
)
def test_a_named_transport_is_refused_with_its_reason(name: str, where: GroupFacts, reason: str) -> None:
    with pytest.raises(TrainingError, match=f"comm.transport={name} cannot be used here") as caught:
        open_route(name, None, where, 1.0)  # type: ignore[arg-type]
    assert reason in str(caught.value)


@pytest.mark.usefixtures("with_driver")
def test_too_few_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in ("copy_engine", "host_staged"):
        problem = ROUTES[name].why_not(facts("g0", "g1"))
        assert problem is not None
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in problem


@pytest.mark.usefixtures("with_driver")
def test_what_can_be_used_is_not_refused() -> None:
    for name, where in (
        ("copy_engine", facts("g0", "g1")),
        ("copy_engine", facts("g0", "g0", backend="gloo")),
        ("host_staged", facts("g0", "g1", machines="ab")),
        ("host_staged", facts("", "", device="cpu", backend="gloo")),
    ):
        assert ROUTES[name].why_not(where) is None


def test_a_line_for_the_log() -> None:
    alone = make_transport(None)
    assert isinstance(alone, AloneTransport)
    assert describe_transport(alone) == "alone (none, no SM used): one rank: nothing travels"


def test_the_doctor_hears_of_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(survey())
    assert lines["ranks on the CPU"].startswith("auto: ")
    assert "host_staged" in lines["ranks on the CPU"]
    gpu = facts("g0", "g0", backend="gloo")
    monkeypatch.setattr(choose, "imagined", lambda: {"ranks that share GPU 0": gpu})
    monkeypatch.setattr(cuda_driver, "load_library", lambda: object())
    assert dict(survey())["ranks that share GPU 0"] == (
        "auto: copy_engine (several ranks share one GPU); can also use collective, host_staged; "
        "not nccl_zero_sm: these tensors are exchanged by gloo, not by NCCL"
    )
