"""Which transport a group uses, and why. What is named in a recipe is used or refused, never replaced by another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from freescale.comm import AloneTransport, CollectiveTransport, Transport, supports_device
from freescale.comm.transports import copy_engine, host_staged, nccl_zero_sm
from freescale.comm.transports.gloo_staged import GlooStagedTransport
from freescale.comm.transports.local_sockets import SocketTransport, on_one_machine
from freescale.comm.world import GroupFacts, gather_facts, own_facts
from freescale.errors import TrainingError, nearest


@dataclass(frozen=True)
class Route:
    """A transport that can be chosen.

    Args:
        why_not: what keeps a group from using it; None if nothing does. The same answer on every rank.
        build: opens it for a group; every rank must do so at the same moment of its program.
    """

    why_not: Callable[[GroupFacts], str | None]
    build: Callable[[dist.ProcessGroup, GroupFacts, float], Transport]


def _no_collective(facts: GroupFacts) -> str | None:
    if facts.backend == "nccl" and facts.shared_gpu:
        return "NCCL takes one rank a GPU, and here several ranks share one"
    return None if facts.backend != "none" else f"the group has no backend for {facts.device.type} tensors"


def _build_collective(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
    if not supports_device(group, facts.device):
        return GlooStagedTransport(group, device=facts.device)
    return CollectiveTransport(group, device=facts.device)


def _no_sockets(facts: GroupFacts) -> str | None:
    if facts.on_gpu:
        return "sockets carry CPU tensors only"
    return None if facts.one_machine else "the ranks are on several machines"


def _build_sockets(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
    return SocketTransport(group, timeout_s=timeout_s)


ROUTES: dict[str, Route] = {
    "collective": Route(_no_collective, _build_collective),
    "local": Route(_no_sockets, _build_sockets),
    "copy_engine": Route(copy_engine.why_not, copy_engine.build),
    "host_staged": Route(host_staged.why_not, host_staged.build),
    "nccl_zero_sm": Route(nccl_zero_sm.why_not, nccl_zero_sm.build),
}


def pick(facts: GroupFacts) -> tuple[str, str]:
    """What `auto` takes for a group, and why."""
    if not facts.on_gpu:
        return "collective", "CPU ranks on several machines"
    if facts.shared_gpu and facts.backend != "nccl":
        return first_usable(facts, "copy_engine", "host_staged", because="several ranks share one GPU")
    return "collective", f"{facts.backend} is what this group has for GPU tensors"


def first_usable(facts: GroupFacts, *names: str, because: str) -> tuple[str, str]:
    """The first of these routes that a group can use, and what speaks against those before it."""
    refused = ""
    for name in names:
        problem = ROUTES[name].why_not(facts) if name in ROUTES else "not there"
        if problem is None:
            return name, because + refused
        refused += f"; not {name}: {problem}"
    return "collective", because + refused


def make_transport(
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str = "cpu",
    kind: str = "auto",
    timeout_s: float = 600.0,
) -> Transport:
    """The transport for a group; None means a single rank. Every rank must call it at the same moment."""
    if group is None:
        return AloneTransport()
    device = torch.device(device)
    if kind == "auto" and device.type == "cpu" and on_one_machine():
        transport: Transport = SocketTransport(group, timeout_s=timeout_s)
        return with_reason(transport, "auto: CPU ranks of one machine")
    facts = gather_facts(group, device)
    if kind == "auto":
        name, why = pick(facts)
        return with_reason(open_route(name, group, facts, timeout_s), f"auto: {why}")
    if kind not in ROUTES:
        raise TrainingError(
            f"there is no transport {kind!r}", allowed=", ".join(["auto", *ROUTES]), next_step=_meant(kind)
        )
    return with_reason(open_route(kind, group, facts, timeout_s), "as the recipe says")


def open_route(name: str, group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
    """Open a transport, or say what keeps this group from using it."""
    problem = ROUTES[name].why_not(facts)
    if problem is not None:
        raise TrainingError(
            f"comm.transport={name} cannot be used here: {problem}",
            next_step="comm.transport=auto picks one that can; `freescale doctor` lists them",
        )
    return ROUTES[name].build(group, facts, timeout_s)


def with_reason(transport: Transport, why: str) -> Transport:
    """The same transport, which now also knows why it was chosen."""
    transport.reason = f"{why}; {transport.reason}"
    return transport


def describe_transport(transport: Transport) -> str:
    """One line about a transport, for logs."""
    free = "no SM used" if transport.sm_free else "uses SMs"
    return f"{transport.name} ({transport.engine}, {free}): {transport.reason}"


def survey() -> list[tuple[str, str]]:
    """What ranks of this machine could use, for `freescale doctor`: a kind of ranks, and a line about it."""
    return [(what, _possible(facts)) for what, facts in hypothetical_groups().items()]


def hypothetical_groups() -> dict[str, GroupFacts]:
    """Groups one could start on this machine."""
    cpu, own = torch.device("cpu"), own_facts(torch.device("cpu"))
    groups = {"ranks on the CPU": GroupFacts([own, own], 0, cpu, "gloo")}
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        groups["a rank on every GPU"] = GroupFacts([own_facts(gpu) for gpu in gpus], 0, gpus[0], "nccl")
    if gpus:
        groups["ranks that share GPU 0"] = GroupFacts([own_facts(gpus[0])] * 2, 0, gpus[0], "gloo")
    return groups


def _possible(facts: GroupFacts) -> str:
    local = facts.one_machine and not facts.on_gpu
    chosen, why = ("local", "CPU ranks of one machine") if local else pick(facts)
    problems = {name: route.why_not(facts) for name, route in ROUTES.items() if name != chosen}
    others = ", ".join(sorted(name for name, problem in problems.items() if problem is None))
    refused = "".join(
        f"; not {name}: {problem}"
        for name, problem in problems.items()
        if problem is not None and name != "local" and f"not {name}" not in why
    )
    return f"auto: {chosen} ({why}); can also use {others or 'nothing else'}{refused}"


def _meant(kind: str) -> str | None:
    guess = nearest(kind, ROUTES)
    return f"did you mean {guess!r}?" if guess else None
