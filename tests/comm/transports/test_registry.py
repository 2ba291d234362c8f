"""What `auto` takes, and what is said where a named transport cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale import registry as kinds
from freescale.comm.rings import cuda_driver
from freescale.comm.traffic.channels import open_channels, open_cpu_channel
from freescale.comm.transport import AloneTransport, Pending, Transport
from freescale.comm.transports import registry as choose
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.registry import (
    describe_transport,
    find_transport_kind,
    goes_on_with_group,
    kind_for_cpu,
    make_transport,
    open_route,
    pick,
    survey,
)
from freescale.comm.transports.traced import TracedTransport
from freescale.comm.world.facts import GroupFacts, RankFacts
from freescale.comm.world.ranks import Ranks
from freescale.errors import ConfigError, FreeScaleError, TrainingError
from freescale.recipe.reading.load import load_config
from freescale.registry import register
from freescale.train.compute.dense_gradients import reduced_in_backward
from freescale.train.log.reports import open_report_channel
from tests.comm.test_transport import exchange_cases
from tests.ranks import run_on_ranks


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
        ("collective", facts("g0", "g0"), "NCCL 2.28.9 takes one rank a GPU, 2.30.0 and later take several"),
        ("collective", facts("g0", "g1", backend="none"), "no backend for cuda tensors"),
        ("copy_engine", facts("", "", device="cpu", backend="gloo"), "these ranks compute on CPUs"),
        ("copy_engine", facts("g0", "g1", machines="ab"), "several machines"),
        ("copy_engine", facts("g0", "g1", reach=False), "cannot map memory"),
        ("host_staged", facts("", "", device="cpu", machines="ab"), "not on one Linux machine"),
        ("local", facts("", "", device="cpu", machines="ab"), "several machines"),
    ],
)
def test_a_named_transport_is_refused_with_its_reason(
    name: str, where: GroupFacts, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freescale.comm.world.shared_gpu.nccl.loaded_nccl", lambda: (2, 28, 9))
    with pytest.raises(TrainingError, match=f"comm.transport={name} cannot be used here") as caught:
        open_route(name, None, where, 1.0)  # type: ignore[arg-type]
    assert reason in str(caught.value)


@pytest.mark.usefixtures("with_driver")
def test_ranks_that_share_a_gpu_may_name_nccl_from_2_30_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freescale.comm.world.shared_gpu.nccl.loaded_nccl", lambda: (2, 31, 2))
    assert find_transport_kind("collective").why_not(facts("g0", "g0")) is None
    assert pick(facts("g0", "g0"))[0] == "copy_engine"  # faster inside one GPU
    monkeypatch.setenv("FREESCALE_SHARED_NCCL", "0")
    assert find_transport_kind("collective").why_not(facts("g0", "g0")) == "FREESCALE_SHARED_NCCL=0"


@pytest.mark.usefixtures("with_driver")
def test_too_few_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in ("copy_engine", "host_staged"):
        problem = find_transport_kind(name).why_not(facts("g0", "g1"))
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
        assert find_transport_kind(name).why_not(where) is None


def test_a_line_for_the_log() -> None:
    alone = make_transport(None)
    assert isinstance(alone, AloneTransport)
    assert describe_transport(alone) == "alone (none, no SM for what travels): one rank: nothing travels"


def test_the_doctor_hears_of_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = dict(survey())
    assert lines["ranks on the CPU"].startswith("auto: ")
    assert "host_staged" in lines["ranks on the CPU"]
    gpu = facts("g0", "g0", backend="gloo")
    monkeypatch.setattr(choose, "hypothetical_groups", lambda: {"ranks that share GPU 0": gpu})
    monkeypatch.setattr(cuda_driver, "load_library", lambda: object())
    assert dict(survey())["ranks that share GPU 0"] == (
        "auto: copy_engine (several ranks share one GPU); can also use collective, host_staged; "
        "not experimental_nccl_zero_sm: these tensors are exchanged by gloo, not by NCCL"
    )


@pytest.fixture
def mine() -> Iterator[None]:
    """Transports from outside, until the test is over."""
    register("transport", "mine")(MyRoute)
    register("transport", "misnamed")(MisnamedRoute)
    yield
    for name in ("mine", "misnamed"):
        kinds._kinds.pop(("transport", name))


class MyTransport(CollectiveTransport):
    """Counts what it carries, in all of its instances."""

    name = "mine"
    num_started = 0

    def start(self, tensor: torch.Tensor, **splits: Any) -> Pending:
        MyTransport.num_started += 1
        return super().start(tensor, **splits)


class MyRoute:
    """CPU ranks; it does not say whether it goes on with the group."""

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        return "it carries CPU tensors only" if facts.on_gpu else None

    @staticmethod
    def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        return MyTransport(group)


class MisnamedRoute(MyRoute):
    """Its transport has another name than it is registered under."""


def everything_over_mine(rank: int) -> None:
    transport = make_transport(dist.group.WORLD, kind="mine")
    assert isinstance(transport, MyTransport)
    assert transport.reason.startswith("as the recipe says")
    assert TracedTransport(transport).name == "mine"
    exchange_cases(transport, rank, 2)
    channels = open_channels(dist.group.WORLD, kind="mine")
    groups = {id(each._group) for each in (transport, channels.express, channels.bulk)}  # type: ignore[attr-defined]
    assert len(groups) == 3, "a channel of a transport that goes on with its group has a group of its own"
    for device in ("cpu", "cuda"):
        assert isinstance(open_cpu_channel(dist.group.WORLD, device=device, kind="mine"), MyTransport)
    ranks = Ranks(
        rank=rank,
        num_ranks=2,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        control=dist.group.WORLD,
    )
    assert isinstance(open_report_channel(ranks, kind="mine"), MyTransport)
    assert open_report_channel(ranks).name == "collective"
    before = MyTransport.num_started
    model, sums = reduced_in_backward(torch.nn.Linear(2, 1), dist.group.WORLD, kind="mine")
    model(torch.ones(1, 2)).sum().backward()
    sums.wait()
    assert MyTransport.num_started > before
    assert next(model.parameters()).grad.tolist() == [[2.0, 2.0]]  # type: ignore[union-attr]


@pytest.mark.usefixtures("mine")
def test_a_transport_from_outside_carries_everything() -> None:
    run_on_ranks(everything_over_mine, 2)


def refused(rank: int) -> list[str]:
    register("transport", "half")(type("Half", (), {"why_not": staticmethod(lambda facts: None)}))
    texts = []
    for kind, device in (("misnamed", "cpu"), ("half", "cpu"), ("mein", "cpu"), ("mine", "cuda")):
        with pytest.raises(FreeScaleError) as caught:
            make_transport(dist.group.WORLD, kind=kind, device=device)
        texts.append(str(caught.value))
    return texts


@pytest.mark.usefixtures("mine")
def test_a_transport_from_outside_is_refused_with_what_is_wrong_with_it() -> None:
    misnamed, half, misspelt, on_gpu = run_on_ranks(refused, 2)[0]
    assert "transport 'misnamed' calls itself 'mine'" in misnamed
    assert "transport 'half' has no build" in half
    assert "did you mean 'mine'?" in misspelt
    assert "comm.transport=mine cannot be used here: it carries CPU tensors only" in on_gpu


@pytest.mark.usefixtures("mine")
def test_the_doctor_hears_of_transports_from_outside() -> None:
    assert (
        "; can also use collective, host_staged, mine, misnamed, two_stage;"
        in dict(survey())["ranks on the CPU"]
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("nccl_zero_sm", "it is called 'experimental_nccl_zero_sm' now"),
        ("host_stagd", "did you mean 'host_staged'?"),
        ("colective", "did you mean 'collective'?"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_the_one_that_is(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match="there is no transport") as caught:
        find_transport_kind(wrong)
    assert caught.value.next_step == right
    assert str(caught.value.allowed).startswith("auto, collective, copy_engine, experimental_nccl_zero_sm")


def test_a_recipe_with_the_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match="experimental_nccl_zero_sm"):
        load_config(None, ["comm.transport=nccl_zero_sm"])


@pytest.mark.usefixtures("with_driver", "mine")
@given(
    gpus=st.lists(st.sampled_from(["g0", "g1", "g2"]), min_size=2, max_size=5),
    machines=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    device=st.sampled_from(["cpu", "cuda"]),
    backend=st.sampled_from(["nccl", "gloo", "none"]),
    reach=st.booleans(),
    launched_here=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_auto_takes_nothing_experimental_and_nothing_from_outside(
    gpus: list[str], machines: list[str], device: str, backend: str, reach: bool, launched_here: bool
) -> None:
    where = facts(*gpus, device=device, backend=backend, machines="".join(machines), reach=reach)
    where = dataclasses.replace(where, launched_here=launched_here)
    name, _ = pick(where)
    assert name in ("collective", "local", "copy_engine", "host_staged")
    assert name == "collective" or where.one_machine, "between machines host_staged is experimental"
    assert name == "collective" or find_transport_kind(name).why_not(where) is None


def test_every_kind_says_whether_it_goes_on_with_the_group() -> None:
    assert [name for name in kinds.names("transport") if goes_on_with_group(find_transport_kind(name))] == [
        "collective"
    ]


def cpu_kinds(rank: int) -> list[str]:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    return [
        kind_for_cpu(dist.group.WORLD, kind, device=device)
        for kind, device in (
            ("auto", gpu),
            ("host_staged", cpu),
            ("host_staged", gpu),
            ("copy_engine", gpu),
            ("collective", gpu),
        )
    ]


def test_cpu_values_of_gpu_ranks_are_left_to_auto_where_the_kind_speaks_of_gpus() -> None:
    assert run_on_ranks(cpu_kinds, 2)[0] == ["auto", "host_staged", "auto", "auto", "collective"]
