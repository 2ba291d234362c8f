"""transports: rows arrive whole over every transport that these ranks can use, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from freescale.comm import Transport
from freescale.comm.world import Ranks
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Finding,
    Report,
    Setting,
    Table,
    evidence_of,
    needs_two,
)
from freescale.prove.each_transport import every_transport, open_transport
from freescale.prove.soak import Checker, Soak
from freescale.registry import register

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes from each rank to each other one."""


@register("claim", "transports")
class Transports:
    """A soak with random uneven splits, and then, only if every number was right, rates by message size."""

    title = "Every transport delivers every row as it was sent"
    order = 50
    limit_s = 240.0
    why_not = staticmethod(needs_two)

    cases = staticmethod(every_transport)

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Exchanges that name themselves; then the time of exchanges that are waited for one by one."""
        transport = open_transport(ranks, setting, timeout_s=30)
        if isinstance(transport, dict):
            return transport
        checker = Checker(ranks)
        began, count = time.monotonic(), 300 if setting.quick else 20_000
        done = 0
        for exchange in Soak(ranks, transport, checker).exchanges(count):
            done = exchange + 1
        bad = checker.bad_by_source()
        evidence: Evidence = {
            "engine": transport.engine,
            "sm_free": transport.sm_free,
            "exchanges": done,
            "seconds": time.monotonic() - began,
            "wrong_from": bad,
        }
        anywhere = ranks.sum_on_cpu(torch.tensor([sum(bad)]))
        if int(anywhere) == 0:
            evidence["rates"] = [_rate(ranks, transport, size, quick=setting.quick) for size in SIZES]
        return evidence

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Wrong numbers name the pair of ranks."""
        seen = evidence_of(reports, setting.case)
        if isinstance(seen, Finding):
            return [seen]
        wrong = {
            (source, target): count
            for target, each in enumerate(seen)
            for source, count in enumerate(each["wrong_from"])
            if count
        }
        first = seen[0]
        sms = "takes no SM" if first["sm_free"] else "takes SMs"
        moved = f"{first['exchanges']:,} exchanges over {first['engine']} ({sms})"
        figures = {
            "exchanges": first["exchanges"],
            "wrong_numbers": sum(wrong.values()),
            "engine": first["engine"],
            "sm_free": first["sm_free"],
            "rates": first.get("rates", []),
        }
        if wrong:
            (source, target), count = max(wrong.items(), key=lambda item: item[1])
            says = (
                f"{moved}: {sum(wrong.values()):,} numbers arrived wrong, most of them ({count:,}) "
                f"from rank {source} to rank {target}"
            )
            return [Finding(setting.case, NOT_PROVEN, says, figures)]
        rates = first["rates"]
        rows = [[_size(r["bytes"]), f"{r['us']:,.0f}", f"{r['gb_s']:.3g}"] for r in rates]
        table = Table(("bytes a pair", "us an exchange", "GB/s a rank"), rows)
        says = f"{moved}, every number right; {rates[0]['us']:,.0f} us for 4 KiB, {rates[-1]['gb_s']:.3g} GB/s a rank"
        return [Finding(setting.case, PROVEN, says, figures, table)]


def _rate(ranks: Ranks, transport: Transport, num_bytes: int, *, quick: bool) -> dict[str, float]:
    """Time of one exchange, waited for to its end: the median, of the slowest rank."""
    counts = [num_bytes // 64] * ranks.num_ranks
    rows = torch.zeros(sum(counts), 16, dtype=torch.int32, device=ranks.device)
    taken = []
    for _ in range(12 if quick else 40):
        ranks.barrier()
        began = time.perf_counter()
        transport.start(rows, send=counts, receive=counts).wait()
        if ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        taken.append(time.perf_counter() - began)
    mine = torch.tensor([statistics.median(taken[2:])], dtype=torch.float64)
    seconds = max(float(each) for each in ranks.gather(mine))
    sent = num_bytes * (ranks.num_ranks - 1)
    return {"bytes": num_bytes, "us": 1e6 * seconds, "gb_s": sent / seconds / 1e9}


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
