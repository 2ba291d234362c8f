"""What the trials train: a small data set, a short float64 recipe, and the runs nobody disturbed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from freescale.data.preparing.preparation import prepare
from freescale.data.preparing.writing import dataset_writer

STEPS, SAVED_EVERY, EVALUATED_EVERY = 18, 3, 6
USERS, ITEMS = 120, 80
RECIPE = (
    "data.path=data",
    "run.out=run",
    "data.max_length=24",
    "data.global_batch=12",
    "model.dim=8",
    "model.layers=1",
    "model.dropout=0",
    "model.dtype=float64",
    "head.num_negatives=8",
    "run.log_every=1",
    "run.device=cpu",
    f"run.steps={STEPS}",
    f"run.checkpoint_every={SAVED_EVERY}",
    f"run.eval_every={EVALUATED_EVERY}",
    "run.keep=100",  # whatever is missing was lost
    # Decisions that come from measured time are fixed, so that runs on as many ranks are equal bit by bit.
    "balance.refit_every=null",
    "pipeline.decide_every=null",
)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """A run nobody disturbed.

    Args:
        folder: where it lies.
        losses: of every step.
        evaluations: everything evaluated, in order.
        tensors: of its last checkpoint, by file and name.
        names: files of its folder.
        seconds: from its start to its end.
    """

    folder: Path
    losses: list[float]
    evaluations: list[dict[str, Any]]
    tensors: Tensors
    names: frozenset[str]
    seconds: float

    @classmethod
    def of(cls, folder: Path, *, seconds: float) -> Reference:
        """What there is to say about a finished run."""
        last = folder / "checkpoints" / step_name(STEPS)
        return cls(
            folder, losses(folder), evaluations(folder), saved_tensors(last), file_names(folder), seconds
        )


def make_data(folder: Path, *, seed: int = 0) -> None:
    """Three shards of several row groups; data of another seed has as many users, items and events."""
    rng = random.Random(seed)
    lines = ["user,item,time"]
    lengths = [4 + user % 20 for user in range(USERS)]
    first = list(range(ITEMS))  # every item occurs
    for user, length in enumerate(lengths):
        for place in range(length):
            item = first.pop() if first else int(rng.paretovariate(0.6)) % ITEMS
            lines.append(f"{user},{item},{1000 * place + rng.randrange(1000)}")
    raw = folder.with_suffix(".csv")
    raw.write_text("\n".join(lines) + "\n")
    with (
        mock.patch.object(dataset_writer, "_ROW_GROUP_USERS", 20),
        mock.patch.object(dataset_writer, "_SHARD_BYTES", 1),
    ):
        prepare(raw, folder)
    raw.unlink()


def cut_at(reference: Reference, folder: Path, step: int) -> None:
    """The folder of a run that was killed after it had saved this step."""
    shutil.copytree(reference.folder, folder)
    for path in checkpoints(folder):
        if path.name > step_name(step):
            shutil.rmtree(path)
    best = json.loads((folder / "checkpoints" / step_name(step) / "meta.json").read_text())["best"]
    (folder / "checkpoints" / "best.json").unlink()
    if best:
        (folder / "checkpoints" / "best.json").write_text(json.dumps(best))
    kept = [e for e in events(folder) if e.get("step", 0) <= step and e["event"] not in ("test", "end")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    for name in ("report.html", "trace.json", "cost_model.json"):
        (folder / name).unlink(missing_ok=True)


def events(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path) -> list[float]:
    """Of every logged step, which must be the first ones, each once."""
    steps = [event for event in events(folder) if event["event"] == "step"]
    if [event["step"] for event in steps] != list(range(1, len(steps) + 1)):
        raise ValueError(f"steps {[event['step'] for event in steps]} are logged")
    return [event["loss"] for event in steps]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Results without the time of day."""
    found = [event for event in events(folder) if event["event"] in ("eval", "test")]
    return [{key: value for key, value in event.items() if key != "time"} for event in found]


def step_name(step: int) -> str:
    """How a checkpoint's folder is called."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Folders that claim to be whole, oldest first."""
    return sorted(p for p in (folder / "checkpoints").glob("step-*") if p.suffix not in (".tmp", ".new"))


def contents(folder: Path) -> dict[str, str]:
    """Every file of every checkpoint by its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for checkpoint in checkpoints(folder)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }


def saved_tensors(checkpoint: Path) -> Tensors:
    """Everything in the safetensors files of a checkpoint."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.name}/{name}": x for file in files for name, x in load_file(file).items()}


def file_names(folder: Path) -> frozenset[str]:
    """Files and folders of a run, checkpoints by their folder's name only."""
    inside = [path.relative_to(folder) for path in folder.rglob("*")]
    return frozenset(str(path) for path in inside if len(path.parts) < 3)
