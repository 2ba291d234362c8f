"""A run killed at any step and started again goes on bit for bit, as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from freescale.errors import EXIT_PEER
from tests.small_run import SMALL

pytestmark = pytest.mark.timed

# Dropout is on: its masks must be the same after a resume, too.
RECIPE = [*SMALL, "model.dropout=0.2", "run.steps=60", "run.eval_every=20", "run.checkpoint_every=7"]


def command(out: Path, *options: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "freescale", "train", *RECIPE, f"run.out={out}", *options]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [e for e in map(json.loads, (line for line in lines if line.endswith("\n"))) if e["event"] == kind]


def wait_for_step(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and any(e["step"] >= step for e in events(out, "step")):
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def kill_at(out: Path, step: int, *options: str, python: str = sys.executable) -> None:
    process = subprocess.Popen(
        command(out, *options, python=python), stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        wait_for_step(out, step, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # to the end of its output: whoever could write some is gone


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    out = tmp_path_factory.mktemp("whole")
    subprocess.run(command(out, python=python), check=True, stdout=subprocess.DEVNULL, timeout=100)
    return out


def assert_same_run(out: Path, reference: Path) -> None:
    steps, expected = events(out, "step"), events(reference, "step")
    assert [e["step"] for e in steps] == list(range(1, 61))
    assert [e["loss"] for e in steps] == [e["loss"] for e in expected]
    quality = [{k: v for k, v in e.items() if k != "time"} for e in events(out, "eval")]
    assert quality == [{k: v for k, v in e.items() if k != "time"} for e in events(reference, "eval")]


def test_sigkill_twice_then_finish_is_bit_identical(tmp_path: Path, uninterrupted: Path, python: str) -> None:
    first, second = sorted(random.sample(range(8, 55), 2))
    kill_at(tmp_path, first, python=python)
    kill_at(tmp_path, second, python=python)
    subprocess.run(command(tmp_path, python=python), check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert_same_run(tmp_path, uninterrupted)


def test_a_finished_run_started_again_changes_nothing(uninterrupted: Path, python: str) -> None:
    before = events(uninterrupted, "step")
    result = subprocess.run(
        command(uninterrupted, python=python), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert events(uninterrupted, "step") == before


def test_another_recipe_in_the_same_folder_is_refused(uninterrupted: Path, python: str) -> None:
    result = subprocess.run(
        command(uninterrupted, "model.dim=24", python=python), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 1
    assert "model.dim: 12 there, 24 now" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow  # from cold; in CI: killed ranks are named (comm/world/test_launcher.py) and resumed (tests/chaos)
def test_two_ranks_one_killed_ends_the_run_and_resumes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "--nproc", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(tmp_path, 10, process)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    start = time.monotonic()
    _, stderr = process.communicate(timeout=100)
    assert time.monotonic() - start < 25
    assert process.returncode == EXIT_PEER
    assert "rank 1 was killed by SIGKILL" in stderr
    assert stderr.count("error:") == 1
    subprocess.run(command(tmp_path, "--nproc", "2"), check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert [e["step"] for e in events(tmp_path, "step")] == list(range(1, 61))


@pytest.mark.slow  # in CI: killed ranks (tests/chaos), both paths resumed anywhere (pipeline/test_schedule.py)
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rowwise_adagrad"])
@pytest.mark.timeout(300)
def test_two_prioritized_ranks_killed_and_resumed_end_as_two_plain_ones(
    tmp_path: Path, optimizer: str
) -> None:
    """Nothing parked or fetched ahead when the ranks died may show: same losses, evaluations and saved tensors."""
    # Decisions that come from measured time are fixed, so that both runs plan alike.
    options = [
        "--nproc",
        "2",
        f"embedding.optimizer={optimizer}",
        "optim.schedule=cosine",
        "balance.refit_every=null",
    ]
    options += ["pipeline.decide_every=null", "run.log_every=1"]
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    subprocess.run(
        command(plain, *options, "pipeline.prioritized=false"),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=100,
    )
    kill_at(killed, random.randrange(8, 25), *options)
    kill_at(killed, random.randrange(30, 55), *options)
    subprocess.run(command(killed, *options), check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert sum(e["hidden_bytes"] for e in events(killed, "step")) > 0, (
        "nothing went ahead: the test shows nothing"
    )
    assert_same_run(killed, plain)
    saved, expected = (saved_tensors(out / "checkpoints" / "step-00000060") for out in (killed, plain))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name}/{name}": x for file in files for name, x in load_file(file).items()}


# In every run: tests/pipeline/test_learnt_ids.py resumes from checkpoints without killing anybody.
@pytest.mark.slow
def test_learnt_ids_come_back_as_they_were(tmp_path: Path) -> None:
    """A table too small for its ids: who has a row and who was evicted is part of the curve."""
    ids = [
        "embedding.id_map=zero_collision",
        "embedding.rows=140",
        "embedding.eviction=lru",
    ]
    ids += ["embedding.max_probe=8", "embedding.admit_after=2", "embedding.buckets=4", "head.num_negatives=2"]
    ids += ["data.global_batch=6"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(whole, *ids), check=True, stdout=subprocess.DEVNULL, timeout=100)
    kill_at(parts, random.randrange(8, 55), *ids)
    subprocess.run(command(parts, *ids), check=True, stdout=subprocess.DEVNULL, timeout=100)
    assert_same_run(parts, whole)
    # A warning is said once by each process.
    pictures = [
        [{k: v for k, v in e.items() if k not in ("time", "warning")} for e in events(out, "ids")]
        for out in (parts, whole)
    ]
    assert pictures[0] == pictures[1]
    assert sum(e["evictions"] for e in pictures[0]) > 20
    assert any(e["evicted_ids"] for e in pictures[0])


# In every run: tests/test_one_curve_experts.py resumes from checkpoints without killing anybody.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_with_experts_spread_over_them_are_killed_and_resumed(tmp_path: Path) -> None:
    """Experts live on one rank each, and so does their optimizer state; biases follow from sums over both."""
    options = ["--nproc", "2", "ffn.kind=moe", "ffn.hidden=16", "moe.experts=5", "moe.parallel=true"]
    options += [
        "moe.aux_loss=0.01",
        "optim.clip_norm=0.5",
        "balance.refit_every=null",
        "pipeline.decide_every=null",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, *options), check=True, stdout=subprocess.DEVNULL, timeout=300)
    kill_at(killed, random.randrange(10, 50), *options)
    subprocess.run(command(killed, *options), check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert_same_run(killed, whole)
    saved, expected = (saved_tensors(out / "checkpoints" / "step-00000060") for out in (killed, whole))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    loads = [[{**e, "time": 0} for e in events(out, "experts")] for out in (killed, whole)]
    assert loads[0] == loads[1]
