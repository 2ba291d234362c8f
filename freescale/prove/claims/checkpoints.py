"""checkpoints: what all ranks write into the run folder comes back bit for bit, and how fast it is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import torch

from freescale.comm.world import Ranks
from freescale.embedding import RowwiseAdagrad, ShardedEmbedding, TableSpec
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Facts,
    Finding,
    Report,
    Setting,
    evidence_of,
    one_case,
)
from freescale.registry import register
from freescale.train import Checkpoints, load_tensors

_DIM = 64


@register("claim", "checkpoints")
class WrittenAndRead:
    """A table that lies on all ranks goes to the disk and back, three times."""

    title = "A checkpoint of all ranks comes back bit for bit"
    order = 90
    limit_s = 300.0
    cases = staticmethod(one_case)

    @staticmethod
    def why_not(facts: Facts) -> str | None:
        """One rank writes, too."""
        return None

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """Write, forget, read, compare; seconds until every byte of every rank is on the disk."""
        megabytes = 4 if setting.quick else 256
        rows = max(64, (megabytes << 20) * ranks.num_ranks // (4 * (_DIM + 1)))
        spec = TableSpec(name="item", num_rows=rows, dim=_DIM, optimizer=RowwiseAdagrad(), init_std=1.0)
        tables = ShardedEmbedding([spec], group=ranks.group, device=ranks.device)
        tensors = tables.state_dict()
        before = {name: _local(value).clone() for name, value in tensors.items()}
        num_bytes = sum(_local(value).nbytes for value in tensors.values())
        folder = setting.out / "checkpoints-of-prove"
        checkpoints = Checkpoints(folder, ranks=ranks, keep=1)
        seconds, wrong = [], []
        try:
            for step in range(1, 4):
                ranks.barrier()
                began = time.monotonic()
                checkpoints.save(step, tensors, {})
                checkpoints.wait()
                ranks.barrier()
                seconds.append(time.monotonic() - began)
            for value in tensors.values():
                _local(value).zero_()
            latest = checkpoints.latest()
            assert latest is not None
            load_tensors(latest, tensors, ranks=ranks)
            wrong = [name for name, value in tensors.items() if not torch.equal(_local(value), before[name])]
            ranks.barrier()
        finally:
            if ranks.is_first:
                shutil.rmtree(folder, ignore_errors=True)
        return {"bytes": num_bytes, "seconds": seconds, "wrong": wrong}

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Bits first, then the rate of all ranks together."""
        seen = evidence_of(reports, "write and read")
        if isinstance(seen, Finding):
            return [seen]
        total = sum(each["bytes"] for each in seen)
        rates = sorted(total / each / 1e9 for each in seen[0]["seconds"])
        figures = {"bytes": total, "gb_per_s": rates[1], "slowest": rates[0], "fastest": rates[-1]}
        wrong = {rank: each["wrong"] for rank, each in enumerate(seen) if each["wrong"]}
        if wrong:
            says = f"ranks {sorted(wrong)} read other bits than they wrote"
            return [Finding("write and read", NOT_PROVEN, says, figures)]
        says = (
            f"{total / 1e6:,.0f} MB of {len(seen)} ranks came back bit for bit; written at {rates[1]:.2f} GB/s "
            f"({rates[0]:.2f} to {rates[-1]:.2f}), every byte on the disk"
        )
        return [Finding("write and read", PROVEN, says, figures)]


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part
