"""What a checkpoint holds of a run: every tensor by a flat name, and a few facts beside them; saved and brought back.

There is no random state: it follows from (seed, step, rank).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.train.run import Run
from freescale.train.state.resume_story import facts_of_place
from freescale.train.state.saved import load_tensors, read_meta


def run_tensors(run: Run) -> dict[str, Tensor]:
    """Every tensor a resumed run needs: model.*, optimizer.*, table.*, and those of each extension under its name."""
    state = run.state
    whole = state.owned.whole
    tensors = {f"model.{name}": whole(name, value) for name, value in state.model.state_dict().items()}
    names = {param: name for name, param in state.model.named_parameters()}
    for group in state.optimizer.param_groups:
        for param in group["params"]:
            name, moments = names[param], adam_state(state.optimizer, param, fused=bool(group["fused"]))
            tensors |= {f"optimizer.{name}.{part}": whole(name, value) for part, value in moments.items()}
    tensors |= {f"table.{name}": value for name, value in state.embedding.state_dict().items()}
    for extension in state.extensions:
        tensors |= {f"{extension.name}.{name}": value for name, value in extension.state_dict().items()}
    return tensors


def adam_state(optimizer: torch.optim.Optimizer, param: Tensor, *, fused: bool) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made now if the first step has not been taken yet.

    A fused optimizer counts steps where the parameter is, any other on the CPU; checkpoints fit both.
    """
    state = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), device=param.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return dict(state)


def save(run: Run, step: int, *, best: bool) -> None:
    """Begin to write a checkpoint of everything the rest of the run depends on."""
    meta = {
        "recipe": dict(run.state.recipe),
        "identity": run.state.identity,
        **run.evaluation.state(),
        **facts_of_place(run),
        "data": run.state.data.state(),
        **({} if run.log is None else {"log": run.log.position(step)}),
        "written": time.time(),
        "num_ranks": run.ranks.num_ranks,
        "balance_decisions": run.rebalancer.decisions.state(),
        "pipeline_decisions": run.switch.state(),
        **({} if run.postponing is None else {"postpone_decisions": run.postponing.state()}),
    }
    report_checkpoint(run, run.checkpoints.wait())
    tables = run.state.embedding.tables.values()
    run.checkpoints.save(step, run_tensors(run), meta, best=best, tables=tables)


def report_checkpoint(run: Run, path: Path | None) -> None:
    """Tell of a checkpoint once it is on disk."""
    if path is not None:
        run.progress.checkpoint(int(path.name.removeprefix("step-")), path)


def restore(run: Run, path: Path) -> int:
    """Bring a checkpoint back; returns the number of steps it has behind it."""
    load_run(run, path)
    return load_facts(run, read_meta(path))


def load_facts(run: Run, meta: Mapping[str, Any]) -> int:
    """Take over what a checkpoint says beside its tensors; returns the number of steps it has behind it."""
    run.state.identity = meta.get("identity", run.state.identity)
    run.evaluation.load_state(meta)
    run.rebalancer.decisions.load_state(meta["balance_decisions"])
    run.switch.load_state(meta.get("pipeline_decisions", []))
    if run.postponing is not None:
        run.postponing.load_state(meta.get("postpone_decisions", []))
    return int(meta["step"])


def load_run(run: Run, path: Path) -> None:
    """Fill every tensor of the run from a checkpoint."""
    load_tensors(path, run_tensors(run), ranks=run.ranks)
    for extension in run.state.extensions:
        extension.restored()
