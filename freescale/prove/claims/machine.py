"""machine: what is there, and that every rank runs the same versions of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from freescale.comm.world import Ranks, is_mps_client, loaded_nccl, virtual_gpus_here
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Facts,
    Finding,
    Report,
    Setting,
    Table,
    evidence_of,
    one_case,
)
from freescale.registry import register
from freescale.version import __version__

_ALIKE = ("freescale", "torch", "python", "nccl", "driver", "triton", "numpy")
"""What must be the same everywhere."""


@register("claim", "machine")
class Machine:
    """Versions, processors, GPUs and the links between them."""

    title = "All ranks run the same versions"
    order = 0
    limit_s = 90.0
    cases = staticmethod(one_case)

    @staticmethod
    def why_not(facts: Facts) -> str | None:
        """There is always something."""
        return None

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """What this rank sees."""
        nccl = loaded_nccl()
        found: Evidence = {
            "freescale": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": _version("triton"),
            "numpy": _version("numpy"),
            "nccl": ".".join(map(str, nccl)) if nccl else "none",
            "driver": _driver(),
            "processor": f"{_processor()}, {os.cpu_count()} cores",
            "load average": f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
        }
        if ranks.device.type == "cuda":
            facts = torch.cuda.get_device_properties(ranks.device)
            found["gpu"] = (
                f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} SMs"
            )
            count, here = torch.cuda.device_count(), torch.cuda.current_device()
            peers = [n for n in range(count) if n != here and torch.cuda.can_device_access_peer(here, n)]
            found["maps memory of"] = f"{len(peers)} of {count - 1} other GPUs it sees"
            shared = virtual_gpus_here()
            found["sharing"] = (
                f"{shared} ranks a GPU{', under MPS' if is_mps_client() else ''}" if shared else "none"
            )
        return found

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """The first rank's, and those that differ."""
        seen = evidence_of(reports, "versions")
        if isinstance(seen, Finding):
            return [seen]
        first = seen[0]
        differing = [
            f"rank {rank} has {name} {each.get(name)}, rank 0 {first.get(name)}"
            for rank, each in enumerate(seen)
            for name in _ALIKE
            if each.get(name) != first.get(name)
        ]
        kinds = {
            name: "; ".join(
                f"{value} ({sum(each.get(name) == value for each in seen)} ranks)"
                for value in sorted({str(each[name]) for each in seen if name in each})
            )
            for name in first
            if name not in _ALIKE
        }
        versions = {name: str(first[name]) for name in _ALIKE}
        table = Table(("what", "found"), [[name, value] for name, value in {**versions, **kinds}.items()])
        figures = {**versions, **kinds, "ranks": len(seen)}
        if differing:
            return [Finding("versions", NOT_PROVEN, "; ".join(differing[:4]), figures, table)]
        hardware = first.get("gpu", first["processor"])
        says = f"{len(seen)} ranks: freescale {__version__}, torch {first['torch']}, {hardware}"
        return [Finding("versions", PROVEN, says, figures, table)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
