"""sm_free: rows travel by a transport that says it takes no SM while a kernel holds every one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from freescale.comm.world import Ranks, gather_facts
from freescale.prove.claim import (
    NOT_PROVEN,
    NOT_TRIED,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    evidence_of,
)
from freescale.prove.each_transport import every_transport, needs_gpus, open_transport
from freescale.prove.hog import Hog
from freescale.prove.stamped_rows import exchange, rows_of, synchronize_all, wanted_at, warm_up
from freescale.registry import register

WAIT_S = 1.0
"""What is not through by then, beside a kernel that holds every SM, waits for that kernel."""
_NUM_BYTES = 1 << 20
_CONTROLS = {
    "tiny kernel": "SMs were free: a tiny kernel ended beside",
    "copy inside": "a copy inside the GPU ended beside: the driver's kernels found room, or none makes it here",
}
"""What takes an SM, and what it would mean if it ended; the driver's own kernels once got in where ours did not."""


@register("claim", "sm_free")
class SmFree:
    """Every SM is held; a tiny kernel and a copy inside the GPU must wait, an exchange without SMs must not."""

    title = "Transports that take no SM end while every SM is held"
    order = 52
    limit_s = 90.0
    environment: ClassVar = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
    """Ranks that share a GPU may use all of it here: a share could not be held as a whole."""

    why_not = staticmethod(needs_gpus)
    cases = staticmethod(every_transport)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Ranks that share a GPU let the first of them hold it; others hold each their own."""
        transport = open_transport(ranks, setting, timeout_s=30)
        if isinstance(transport, dict):
            return transport
        # Rows that stay on their rank are copied in place, which takes SMs and no link.
        rows, counts = rows_of(ranks, _NUM_BYTES, own=False)
        wanted = wanted_at(ranks, _NUM_BYTES, own=False)
        landing = torch.empty_like(wanted, pin_memory=True)
        warm_up(transport, ranks, _NUM_BYTES)
        small, stream = torch.zeros(64, device=ranks.device), torch.cuda.Stream(ranks.device)
        here, there = torch.empty(2, _NUM_BYTES, dtype=torch.uint8, device=ranks.device)
        tries: dict[str, Callable[[], Any]] = {
            "tiny kernel": lambda: small.add_(1),
            "copy inside": lambda: there.copy_(here),
            "exchange": lambda: landing.copy_(exchange(transport, rows, counts), non_blocking=True),
        }
        for act in (*tries.values(), *tries.values()):  # every kernel is loaded before one spins
            with torch.cuda.stream(stream):
                act()
            synchronize_all(ranks)
        holds = holds_its_gpu(ranks)
        hog = Hog(ranks.device) if holds else None
        found: Evidence = {"says_sm_free": transport.sm_free, "engine": transport.engine, "holds": holds}
        for name, act in tries.items():
            landing.zero_()
            synchronize_all(ranks)
            if hog is not None:
                hog.hold()
            ranks.barrier()
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                act()
                event = torch.cuda.Event()
                event.record()
            found[name] = _finishes(event)
            found[f"{name} ms"] = 1000 * (time.perf_counter() - began)
            found[f"{name} held"] = hog is None or hog.holds
            found[f"{name} right"] = torch.equal(landing, wanted)
            ranks.barrier()  # nobody gives SMs back before all have looked
            if hog is not None:
                hog.release()
            stream.synchronize()
        found["right afterwards"] = torch.equal(landing, wanted)
        return found

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """The controls first: where one of them ends, SMs were free and nothing is shown."""
        seen = evidence_of(reports, setting.case)
        if isinstance(seen, Finding):
            return [seen]
        ended = [each["exchange"] and each["exchange right"] and each["exchange held"] for each in seen]
        controls = [name for name in _CONTROLS if any(each[name] for each in seen if each["holds"])]
        says_free = bool(seen[0]["says_sm_free"])
        figures = {"says_sm_free": says_free, "ended_on": sum(ended), "ms": seen[0]["exchange ms"]}
        what = f"{seen[0]['engine']}: ended on {sum(ended)} of {len(seen)} ranks while every SM was held"
        if controls:
            return [Finding(setting.case, NOT_PROVEN, _CONTROLS[controls[0]], figures)]
        if not all(each["right afterwards"] for each in seen):
            return [Finding(setting.case, NOT_PROVEN, "wrong rows once the SMs were free again", figures)]
        if not says_free:
            return [Finding(setting.case, NOT_TRIED, f"it takes SMs and says so; {what}", figures)]
        return [Finding(setting.case, PROVEN if all(ended) else NOT_PROVEN, what, figures)]


def holds_its_gpu(ranks: Ranks) -> bool:
    """Whether this rank holds the SMs of its GPU: of ranks that share one, the first. Every rank must call it."""
    assert ranks.group is not None
    shared = gather_facts(ranks.group, ranks.device).shared_gpu  # also on the first, for whom the others wait
    return ranks.is_first or not shared


def _finishes(event: torch.cuda.Event) -> bool:
    """Whether a stream gets there within the time, without the host waiting in the driver."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if event.query():
            return True
        time.sleep(0.001)
    return False
