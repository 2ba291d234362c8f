"""Which transport a group uses, and why. What is named in a recipe is used or refused, never replaced by another.

Kinds are files of `kinds/`, or registered from outside (`freescale.registry`), where one looks like this:

    @register("transport", "mine")
    class MyRoute:
        keeps_group = False      # it meets the other ranks through the group and then talks to them itself

        @staticmethod
        def why_not(facts): return None if facts.one_machine else "the ranks are on several machines"

        @staticmethod
        def build(group, facts, timeout_s): return MyTransport(group)      # its `name` is "mine"

Then `comm.transport=mine` carries rows, ids, dense gradients (unless `comm.sums` names another) and the sums of a step.
`auto` takes only what ships and has been run on its hardware: nothing from outside, nothing experimental.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.distributed as dist

from freescale.comm import AloneTransport, Transport, own_group
from freescale.comm.world import GroupFacts, gather_facts, no_shared_nccl, own_facts
from freescale.errors import ConfigError, TrainingError
from freescale.registry import find, meant, names

AUTO = "auto"
FEWEST_FOR_TWO_STAGES = 16
"""Ranks from which on two stages take less of the host than one; 8 need a fifth more (benchmarks/id_exchange.py)."""
_CPU_ONLY = ("local", "two_stage")
_RENAMED = {"nccl_zero_sm": "experimental_nccl_zero_sm"}


class TransportKind(Protocol):
    """What is registered as a transport: whether a group can use it, and how it is opened. Both are static methods."""

    def why_not(self, facts: GroupFacts) -> str | None:
        """What keeps a group from using it; None if nothing does. The same answer on every rank."""

    def build(self, group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        """Open it for a group; every rank must do so at the same moment of its program."""


def find_transport_kind(name: str, *, key: str = "comm.transport") -> TransportKind:
    """The kind of this name.

    Raises:
        ConfigError: there is none, or what is registered under the name is no transport.
    """
    if name not in names("transport"):
        new = _RENAMED.get(name)
        raise ConfigError(
            f"{key}: there is no transport {name!r}",
            allowed=", ".join([AUTO, *names("transport")]),
            next_step=f"it is called {new!r} now" if new else meant("transport", name),
        )
    route = find("transport", name).make
    missing = [part for part in ("why_not", "build") if not callable(getattr(route, part, None))]
    if missing:
        raise ConfigError(
            f"transport {name!r} has no {' and no '.join(missing)}",
            next_step="give it both as static methods: see freescale/comm/transports/registry.py",
        )
    return cast(TransportKind, route)


def is_foreign(kind: str) -> bool:
    """Whether a transport was registered from outside the package."""
    return kind != AUTO and not find("transport", kind).ships


def goes_on_with_group(route: TransportKind) -> bool:
    """Whether a transport uses the group after it was opened; where it does not say (`keeps_group`), it may."""
    return bool(getattr(route, "keeps_group", True))


def pick(facts: GroupFacts) -> tuple[str, str]:
    """What `auto` takes for a group, and why."""
    if not facts.on_gpu:
        if facts.one_machine and facts.launched_here:
            return "local", "CPU ranks of one machine"
        return "collective", "CPU ranks on several machines"
    if facts.shared_gpu:
        because = "several ranks share one GPU"
        if not facts.one_machine:
            return "collective", f"{because}; not host_staged: between machines it is experimental"
        return first_usable(facts, "copy_engine", "host_staged", because=because)
    return "collective", f"{facts.backend} is what this group has for GPU tensors"


def first_usable(facts: GroupFacts, *kinds: str, because: str) -> tuple[str, str]:
    """The first of these kinds that a group can use, and what speaks against those before it."""
    refused = ""
    for name in kinds:
        problem = find_transport_kind(name).why_not(facts)
        if problem is None:
            return name, because + refused
        refused += f"; not {name}: {problem}"
    return "collective", because + refused


def make_transport(
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str = "cpu",
    kind: str = AUTO,
    timeout_s: float = 600.0,
    alone: bool = False,
    why: str = "as the recipe says",
    key: str = "comm.transport",
) -> Transport:
    """The transport for a group; None means a single rank. Every rank must call it at the same moment.

    Args:
        group: the ranks.
        device: where their tensors are.
        kind: what a recipe names.
        timeout_s: how long to wait for another rank.
        alone: whether nothing else may use the connection: where it goes on with the group, it gets one of its own.
        why: a kind is named.
        key: of the recipe, which names it.
    """
    if group is None:
        return AloneTransport()
    if kind != AUTO:
        find_transport_kind(kind, key=key)  # a wrong name is refused before anybody waits for the others
    facts = gather_facts(group, torch.device(device))
    name, why = pick(facts) if kind == AUTO else (kind, why)
    transport = open_route(name, group, facts, timeout_s, alone=alone, key=key)
    return with_reason(transport, f"auto: {why}" if kind == AUTO else why)


def kind_for_cpu(group: dist.ProcessGroup, kind: str, *, device: torch.device) -> str:
    """How CPU values (ids, the sums of a step) of ranks that compute on a device travel; every rank must call it.

    Ranks on CPUs do as the recipe says. On GPUs it speaks of GPU tensors: `collective`, or a transport from outside
    that can, carries CPU values, too. The others leave them to `auto`: rings take longer than sockets for so few bytes.
    """
    if kind == AUTO or device.type == "cpu":
        return kind
    if kind != "collective" and not is_foreign(kind):
        return AUTO
    return (
        kind if find_transport_kind(kind).why_not(gather_facts(group, torch.device("cpu"))) is None else AUTO
    )


def kind_for_ids(
    group: dist.ProcessGroup, kind: str, *, device: torch.device, ids: str = AUTO
) -> tuple[str, str]:
    """How ids, their counts and bits about them travel between hosts, and why; every rank must call it.

    `auto` takes two stages between nodes with many ranks: the host's time for an exchange is that of its messages, and
    one stage has one for every rank. Few ranks, those of one node, and a transport from outside go as other CPU values.

    Args:
        group: the ranks.
        kind: how rows travel.
        device: where the ranks compute.
        ids: what a recipe names (`comm.ids`).
    """
    if ids != AUTO:
        return ids, "as the recipe says"
    plain = kind_for_cpu(group, kind, device=device)
    if plain != AUTO and is_foreign(plain):
        return plain, "as the recipe says of rows"
    facts = gather_facts(group, torch.device("cpu"))
    nodes = len(facts.nodes)
    problem = find_transport_kind("two_stage").why_not(facts)
    if nodes == 1:
        problem = "the ranks are on one node"
    elif len(facts.ranks) < FEWEST_FOR_TWO_STAGES:
        problem = f"it pays from {FEWEST_FOR_TWO_STAGES} ranks on"
    if problem is None:
        return "two_stage", f"auto: the ranks are on {nodes} nodes"
    return plain if plain != AUTO else pick(facts)[0], f"auto: not two_stage: {problem}"


def open_route(
    name: str,
    group: dist.ProcessGroup,
    facts: GroupFacts,
    timeout_s: float,
    *,
    alone: bool = False,
    key: str = "comm.transport",
) -> Transport:
    """Open a transport, or say what keeps this group from using it."""
    route = find_transport_kind(name)
    problem = route.why_not(facts)
    if problem is not None:
        raise TrainingError(
            f"{key}={name} cannot be used here: {problem}",
            next_step=f"{key}=auto picks one that can; `freescale doctor` lists them",
        )
    if alone and goes_on_with_group(route):
        backend = "gloo" if facts.backend == "none" else facts.backend
        group = own_group(group, backend=backend, timeout_s=timeout_s)
    transport = route.build(group, facts, timeout_s)
    if transport.name != name:
        raise ConfigError(
            f"transport {name!r} calls itself {transport.name!r}",
            next_step="give it the `name` it is registered under: further channels are opened by it",
        )
    return transport


def with_reason(transport: Transport, why: str) -> Transport:
    """The same transport, which now also knows why it was chosen."""
    transport.reason = f"{why}; {transport.reason}"
    return transport


def describe_transport(transport: Transport) -> str:
    """One line about a transport, for logs."""
    free = "no SM for what travels" if transport.sm_free else "uses SMs"
    return f"{transport.name} ({transport.engine}, {free}): {transport.reason}"


def survey() -> list[tuple[str, str]]:
    """What ranks of this machine could use, for `freescale doctor`: a kind of ranks, and a line about it."""
    return [(what, _possible(facts)) for what, facts in hypothetical_groups().items()]


def hypothetical_groups() -> dict[str, GroupFacts]:
    """Groups one could start on this machine."""
    cpu, own = torch.device("cpu"), own_facts(torch.device("cpu"))
    groups = {"ranks on the CPU": GroupFacts([own, own], 0, cpu, "gloo", launched_here=True)}
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        groups["a rank on every GPU"] = GroupFacts([own_facts(gpu) for gpu in gpus], 0, gpus[0], "nccl")
    if gpus:
        backend = "gloo" if no_shared_nccl() else "nccl"
        groups["ranks that share GPU 0"] = GroupFacts([own_facts(gpus[0])] * 2, 0, gpus[0], backend)
    return groups


def _possible(facts: GroupFacts) -> str:
    chosen, why = pick(facts)
    problems = {
        name: find_transport_kind(name).why_not(facts) for name in names("transport") if name != chosen
    }
    others = ", ".join(sorted(name for name, problem in problems.items() if problem is None))
    refused = "".join(
        f"; not {name}: {problem}"
        for name, problem in problems.items()
        if problem is not None and name not in _CPU_ONLY and f"not {name}" not in why
    )
    return f"auto: {chosen} ({why}); can also use {others or 'nothing else'}{refused}"
