"""Two machines under torchrun: the losses of one process, and a network between the ranks that says what it is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.effort import slow
from tests.nodes import PORT, nodes, why_no_nodes
from tests.small_run import SMALL

RECIPE = (*SMALL, "model.dtype=float64", "run.steps=6", "run.log_every=3", "run.eval_every=null")


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


EXPERTS = ("ffn.kind=moe", "ffn.hidden=16", "moe.experts=4", "moe.top_k=2", "moe.aux_loss=0.01")
"""Their counts arrive beside the next step here, and move biases in the one after it, as on one machine."""


@pytest.mark.timeout(300)  # the launcher, its agents and two ranks: slow where others have the cores
@pytest.mark.parametrize("change", [(), slow(EXPERTS)], ids=["", "experts"])
def test_two_machines_have_the_losses_of_one_process(
    tmp_path: Path, python: str, change: tuple[str, ...]
) -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    recipe = (*RECIPE, *change)
    train = [python, "-m", "freescale", "train", *recipe, f"run.out={tmp_path}/one"]
    subprocess.run(train, check=True, capture_output=True)
    there = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=node-a:{PORT}"]
    train = [python, "-m", "torch.distributed.run", *there, "-m", "freescale", "train", *recipe]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with nodes(2, delay_ms=1) as machines:
        running = [
            machine.popen(
                [*train, f"run.out={tmp_path}/two"],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for machine in machines
        ]
        said = [process.communicate(timeout=250)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], "\n".join(said)
        assert min(machines[1].bytes_on_wire()) > 100_000
    one, two = (events(tmp_path / name, "step") for name in ("one", "two"))
    assert [event["loss"] for event in two] == pytest.approx([event["loss"] for event in one], abs=1e-9)
    assert all(0 < event["comm"] < 1 for event in two)
    (start,) = events(tmp_path / "two", "start")
    assert "collective" in json.dumps(start)
