"""contention: what exchanges cost the compute beside them, and what compute leaves of their rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from freescale.comm.world import Ranks, virtual_gpus_here
from freescale.prove.beside import beside, compute_jobs, exchanges
from freescale.prove.claim import (
    NOT_PROVEN,
    NOT_TRIED,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    Table,
    evidence_of,
)
from freescale.prove.each_transport import every_transport, needs_gpus, open_transport
from freescale.prove.stamped_rows import rows_of, warm_up
from freescale.registry import register

MOST_SLOWDOWN = 1.05
"""Of a GEMM beside a transport that takes no SM. Layers bound by memory are slowed by whatever moves memory."""
_NUM_BYTES = 4 << 20


@register("claim", "contention")
class Contention:
    """Rank 0 computes while all ranks exchange: each alone, then both."""

    title = "Transports that take no SM leave a GEMM beside them its speed"
    order = 54
    limit_s = 150.0
    environment: ClassVar = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}

    why_not = staticmethod(needs_gpus)
    cases = staticmethod(every_transport)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """A GEMM, and an HSTU layer forward and backward."""
        transport = open_transport(ranks, setting, timeout_s=60)
        if isinstance(transport, dict):
            return transport
        warm_up(transport, ranks, _NUM_BYTES)
        rows, counts = rows_of(ranks, _NUM_BYTES)
        comm = exchanges([transport], rows, counts, on_the_way=2)
        moved = _NUM_BYTES * (ranks.num_ranks - 1)
        jobs = compute_jobs(ranks.device, 4096 if setting.quick else 8192)
        return {
            "sm_free": transport.sm_free,
            "engine": transport.engine,
            "sharing": virtual_gpus_here(),
            "jobs": {name: beside(ranks, job, comm, moved) for name, job in jobs.items()},
        }

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """The GEMM decides for transports that take no SM; for others the figures are what there is to say."""
        seen = evidence_of(reports, setting.case)
        if isinstance(seen, Finding):
            return [seen]
        jobs = seen[0]["jobs"]
        rows = [
            [
                name,
                f"{one['slowdown']:.2f}",
                f"{one['gb_s_alone']:.1f}",
                f"{one['gb_s_loaded']:.1f}",
                f"{one['rate_kept']:.0%}",
            ]
            for name, one in jobs.items()
        ]
        table = Table(("beside", "times its time alone", "GB/s alone", "GB/s beside", "rate kept"), rows)
        gemm = next(iter(jobs.values()))
        says = (
            f"{seen[0]['engine']}: a GEMM takes {gemm['slowdown']:.2f} times as long beside it, exchanges keep "
            f"{gemm['rate_kept']:.0%} of {gemm['gb_s_alone']:.1f} GB/s"
        )
        if not seen[0]["sm_free"]:
            return [Finding(setting.case, NOT_TRIED, f"it takes SMs and says so; {says}", jobs, table)]
        held = gemm["slowdown"] <= MOST_SLOWDOWN
        if not held and (sharing := seen[0].get("sharing")):
            says += (
                f"; {sharing} ranks that share a GPU move all their rows through its memory, others do not"
            )
        return [Finding(setting.case, PROVEN if held else NOT_PROVEN, says, jobs, table)]
