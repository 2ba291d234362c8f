"""SIGTERM: the run saves, says so in one line, ends with exit code 75, and the same command goes on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from freescale.comm.world import free_port
from tests.end_to_end.test_kill_and_resume import events, saved_tensors, wait_for_step
from tests.small_run import SMALL

RECIPE = [
    *SMALL,
    "run.steps=24",
    "run.eval_every=10",
    "balance.refit_every=null",
    "pipeline.decide_every=null",
]


def command(python: str, out: Path, *options: str) -> list[str]:
    return [python, "-m", "freescale", "train", *RECIPE, f"run.out={out}", *options]


def finish(python: str, out: Path, *options: str) -> str:
    done = subprocess.run(command(python, out, *options), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same_run(out: Path, whole: Path) -> None:
    for kind in ("step", "eval"):
        ours, wanted = (
            [
                {k: v for k, v in event.items() if k in ("step", "loss", "hr@10", "ndcg@10", "split")}
                for event in events(folder, kind)
            ]
            for folder in (out, whole)
        )
        assert ours == wanted
    saved, expected = (saved_tensors(folder / "checkpoints" / "step-00000024") for folder in (out, whole))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sigterm_saves_and_the_same_command_goes_on(tmp_path: Path, python: str, num_ranks: int) -> None:
    options = ("--nproc", str(num_ranks), f"data.workers={2 - num_ranks}")
    finish(python, tmp_path / "whole", *options)
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(python, out, *options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(out, 5, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    (step,) = [event["step"] for event in events(out, "stopped")]
    saved = out / "checkpoints" / f"step-{step:08d}"
    begun, _, ended = " ".join(said.split()).partition(" loading torch ")
    assert begun.startswith("freescale ")
    assert ended == (f"stopped on request at step {step}, saved {saved}; the same command goes on from there")
    first = finish(python, out, *options).splitlines()[0]
    assert first.startswith(f"resuming {out} from step {step} (written ")
    assert first.endswith("nothing has changed since)")
    assert_same_run(out, tmp_path / "whole")


def test_sigterm_saves_though_nobody_reads_what_is_printed(tmp_path: Path, python: str) -> None:
    """`freescale train ... 2>&1 | tee log`, all told at once: tee is gone first."""
    process = subprocess.Popen(
        command(python, tmp_path, "--nproc", "2", "run.log_every=1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.close()
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    (step,) = [event["step"] for event in events(tmp_path, "stopped")]
    assert (tmp_path / "checkpoints" / f"step-{step:08d}" / "meta.json").exists()


def test_ranks_started_by_somebody_else_are_told_one_after_the_other(tmp_path: Path, python: str) -> None:
    """As under torchrun or Slurm: each process hears of it by itself, some of them later."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command(python, tmp_path),
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    wait_for_step(tmp_path, 5, ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], said
    assert "stopped on request at step" in said[0]
    assert said[1] == ""
    assert "now 1 rank" in finish(python, tmp_path).splitlines()[0]
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 25))
