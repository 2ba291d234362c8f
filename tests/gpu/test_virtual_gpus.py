"""Virtual GPUs: ranks on one GPU learn what one rank learns, over every transport, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from freescale.comm.world.shared_gpu.mps import PREFIX
from freescale.comm.world.shared_gpu.shares import can_share
from tests.chaos.workload import saved_tensors
from tests.gpu.killing import kill_rank_1
from tests.small_run import EXPERTS, MANY_PIECES, SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPOSITORY = Path(__file__).parents[2]
RECIPE = (*SMALL, "run.device=cuda", "model.dtype=float64", "run.steps=40", "run.eval_every=20")


def train(folder: Path, *extra: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freescale", "train", *RECIPE, f"run.out={folder}", *extra]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, cwd=folder.parent, check=False
    )
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One rank with the GPU to itself."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(folder)
    return losses(folder)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) == []


@pytest.mark.parametrize("transport", ["auto", "collective", "host_staged", "copy_engine"])
@pytest.mark.parametrize("prioritized", ["true", "false"])
def test_two_virtual_gpus_have_the_losses_of_one_rank(tmp_path, alone, transport, prioritized):
    run = train(
        tmp_path / "run",
        "--virtual-gpus",
        "2",
        f"comm.transport={transport}",
        f"pipeline.prioritized={prioritized}",
    )
    assert "2 virtual GPUs on" in run.stderr
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-8)
    assert len(events(tmp_path / "run", "eval")) >= 2
    assert all(0 <= event["bubble"] <= 1 for event in events(tmp_path / "run", "step"))


@pytest.mark.parametrize("transport", ["host_staged", "copy_engine"])
def test_postponed_gradients_summed_beside_the_next_forward_leave_the_bits_of_the_plain_order(
    tmp_path, transport
):
    """Layers are updated on the stream of the forward, from sums on a stream beside it; evaluations see all of them."""
    common = ("--virtual-gpus", "2", f"comm.transport={transport}", "pipeline.decide_every=null")
    common = (*common, *MANY_PIECES, "run.capture=off", "balance.refit_every=null")
    for postpone in ("on", "off"):
        train(tmp_path / postpone, *common, f"pipeline.postpone={postpone}")
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    ours, plain = (events(tmp_path / each, "eval") for each in ("on", "off"))
    assert [event["hr@10"] for event in ours] == [event["hr@10"] for event in plain]


@pytest.mark.parametrize("num_ranks", ["2", "3"])
def test_sums_that_stay_inside_the_gpu_have_the_bits_of_those_by_the_host(tmp_path, num_ranks):
    """Rows go by the host in both; three ranks add up in parts, two each all of it."""
    common = ("--virtual-gpus", num_ranks, "comm.transport=host_staged", "pipeline.decide_every=null")
    common = (*common, *MANY_PIECES, "balance.refit_every=null", "pipeline.postpone=on")
    for sums in ("auto", "copy_engine"):
        train(tmp_path / sums, *common, f"comm.sums={sums}")
    assert losses(tmp_path / "auto") == losses(tmp_path / "copy_engine")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["host_staged", "copy_engine"])
def test_replays_that_leave_gradients_of_weights_for_later_have_the_bits_of_one_replay(tmp_path, transport):
    """Weights, moments and tables, over 300 steps of a schedule, in the middle of which a rank is killed."""
    common = ("--virtual-gpus", "2", f"comm.transport={transport}", "pipeline.decide_every=null")
    common = (*common, *MANY_PIECES, "model.dtype=bfloat16", "balance.refit_every=null", "run.steps=300")
    common = (*common, "optim.schedule=cosine", "optim.warmup_steps=50", "run.checkpoint_every=100")
    # An evaluation sees all weights updated; the replay behind it must not update them again.
    common = (*common, "run.eval_every=25", "eval.max_users=16")
    ours, plain = tmp_path / "on", tmp_path / "off"
    ended = kill_rank_1((*RECIPE, *common, "pipeline.postpone=on"), ours, behind=150)
    assert ended.code != 0
    assert "rank 1" in ended.said
    assert 150 <= len(losses(ours)) < 300
    train(ours, *common, "pipeline.postpone=on")
    train(plain, *common, "pipeline.postpone=off")
    for folder in (ours, plain):
        assert events(folder, "step")[-1]["captured"] > 0.5
    assert len(losses(ours)) == 300
    assert losses(ours) == losses(plain)
    learnt, expected = (saved_tensors(folder / "checkpoints" / "step-00000300") for folder in (ours, plain))
    assert learnt.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(learnt[name]), torch.as_tensor(value)), name
    told = " ".join(event["text"] for event in events(ours, "notice"))
    assert "plain order" not in told
    assert "weights are updated" not in told


def test_replays_of_experts_have_the_bits_of_one_replay_and_the_losses_of_one_rank(tmp_path):
    common = (
        *MANY_PIECES,
        *EXPERTS,
        "model.dtype=float32",
        "pipeline.decide_every=null",
        "balance.refit_every=null",
        "run.steps=60",
    )
    common = (*common, "run.eval_every=30", "eval.max_users=16")
    for name, ways in (
        ("later", ("--virtual-gpus", "2", "pipeline.postpone=on")),
        ("plain", ("--virtual-gpus", "2", "pipeline.postpone=off")),
        ("alone", ("run.device=cuda",)),
    ):
        train(tmp_path / name, *common, *ways)
        assert events(tmp_path / name, "step")[-1]["captured"] > 0.5, name
    later, plain, alone = (losses(tmp_path / name) for name in ("later", "plain", "alone"))
    assert later == plain
    # In float32 sums of another order are rounded otherwise, and a token between two experts may choose the other one.
    assert later == pytest.approx(alone, rel=2e-3)


def test_the_proof_of_one_curve_holds_every_time(tmp_path):
    """Whole tables were gathered by gloo where they lie, on GPUs, whose memory it cannot read: signal 11."""
    command = [
        sys.executable,
        "-m",
        "freescale",
        "prove",
        "--virtual-gpus",
        "2",
        "--quick",
        "--only",
        "one_curve",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_it_goes_on_from_a_checkpoint_on_another_number_of_ranks(tmp_path, alone):
    folder = tmp_path / "run"
    train(folder, "--virtual-gpus", "2", "run.steps=20")
    train(folder, "--virtual-gpus", "3")
    assert losses(folder) == pytest.approx(alone, rel=1e-8)


def test_a_rank_that_fails_ends_the_others_and_the_daemon(tmp_path):
    """More than its share of the memory: an error of one kind on all ranks, told once."""
    run = train(
        tmp_path / "run",
        "--virtual-gpus",
        "2",
        "embedding.id_map=hash",
        "embedding.rows=4000000000",
        expect=1,
    )
    assert run.stderr.count("failed in stage") == 1


def test_the_doctor_knows():
    assert "side by side" in can_share() or "time-sliced" in can_share()
