"""NCCL's own all-to-all between ranks that share a GPU, with so many blocks (CTAs) a communicator at most.

NCCL takes several ranks a GPU from 2.30 on; an older one that torch brings is replaced by LD_PRELOAD. The bound of the
environment, which `--virtual-gpus` sets, would overrule those of the communicators, so it is taken away here.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

from freescale.comm.transport import Transport
from freescale.comm.transports.kinds.collective import CollectiveRoute, CollectiveTransport
from freescale.comm.world.facts import GroupFacts
from freescale.comm.world.shared_gpu.nccl import MAX_CTAS
from freescale.registry import register

CTAS = (1, 2, 4, 8, 16, 32)


def route(name: str, *, most: int | None) -> type:
    """What is registered as a transport."""

    class NcclRoute:
        keeps_group = False

        @staticmethod
        def why_not(facts: GroupFacts) -> str | None:
            if facts.backend != "nccl":
                return f"these ranks have {facts.backend}, not NCCL: LD_PRELOAD one of 2.30 or later"
            return CollectiveRoute.why_not(facts)

        @staticmethod
        def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = datetime.timedelta(seconds=timeout_s)
            if most is not None:
                options.config.max_ctas = most
            members = dist.get_process_group_ranks(group)
            own = dist.new_group(members, backend="nccl", pg_options=options, timeout=options._timeout)
            transport = CollectiveTransport(own, device=facts.device)
            transport.name = name
            return transport

    return NcclRoute


def register_all() -> None:
    """Let `make_transport` know it as nccl:default, nccl:1, :2, :4, :8, :16 and :32."""
    os.environ.pop(MAX_CTAS, None)
    for most in (None, *CTAS):
        name = f"nccl:{most or 'default'}"
        register("transport", name)(route(name, most=most))
