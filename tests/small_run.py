"""A small run on embedded data, for tests that train."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world import Ranks, whole_tensor
from freescale.model import Recommender
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import train
from freescale.train.run import Run
from freescale.train.state.run_state import run_tensors

SMALL = (
    "synthetic.users=300",
    "synthetic.items=150",
    "synthetic.mean_length=12",
    "synthetic.max_length=80",
    "data.max_length=40",
    "data.global_batch=24",
    "model.dim=12",
    "model.layers=1",
    "model.dropout=0",
    "head.num_negatives=16",
    "run.log_every=1",
    "run.device=cpu",
)

EXPERTS = ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.aux_loss=0.05", "moe.z_loss=0.01")

MANY_PIECES = ("model.layers=4", "model.dim=256", "model.heads=4")
"""Wide enough that the gradients of every layer are a piece of their own: those of narrow models are one altogether."""


class Recorder:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def these_ranks() -> Ranks:
    """The ranks of this process: alone, or those `run_on_ranks` has started."""
    cpu = torch.device("cpu")
    if not dist.is_initialized():
        return Ranks(rank=0, num_ranks=1, device=cpu)
    return Ranks(
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        device=cpu,
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo"),
        background=dist.new_group(backend="gloo"),
    )


def make_run(overrides: Sequence[str], folder: str | Path | None = None) -> tuple[Run, Recorder]:
    folder = folder or tempfile.mkdtemp()
    config = load_config(None, [*SMALL, *overrides, f"run.out={folder}"])
    recorder = Recorder()
    return build_run(config, build_source(config), these_ranks(), Progress([recorder])), recorder


def spoil_loss(monkeypatch: pytest.MonkeyPatch, *, at_step: int) -> None:
    """Planted, not provoked: whether a huge learning rate overflows depends on the CPU. A step is one call."""
    forward, calls = Recommender.forward, itertools.count(1)

    def spoilt(self: Recommender, *args: Any, **options: Any) -> torch.Tensor:
        loss = forward(self, *args, **options)
        return loss * float("nan") if next(calls) == at_step else loss

    monkeypatch.setattr(Recommender, "forward", spoilt)


def full_tensors(run: Run) -> dict[str, Any]:
    """Every tensor of the run, whole, as numpy arrays."""
    whole = {}
    for name, value in run_tensors(run).items():
        value = whole_tensor(value)
        value = value.float() if value.dtype == torch.bfloat16 else value
        whole[name] = value.detach().cpu().numpy().copy()
    return whole


def train_small(
    overrides: Sequence[str], folder: str | Path | None = None, *, resume_from: Path | None = None
) -> dict[str, Any]:
    """Losses, evaluations and final tensors of a small run on these ranks."""
    run, recorder = make_run(overrides, folder)
    summary = train(run, resume_from=resume_from)
    return {
        "losses": [event["loss"] for event in recorder.of("step")],
        "evals": recorder.of("eval"),
        "tensors": full_tensors(run),
        "summary": summary,
    }
