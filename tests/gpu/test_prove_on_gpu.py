"""`freescale prove` on ranks that share a GPU: claims that only a GPU can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
REPOSITORY = Path(__file__).parents[2]


def prove(out: Path, only: str) -> dict[str, dict]:
    """Findings by claim and case, of two virtual GPUs."""
    command = [sys.executable, "-m", "freescale", "prove", "--quick", "--virtual-gpus", "2", "--only", only]
    done = subprocess.run(
        [*command, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (out / "proof.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    claims = json.loads((out / "proof.json").read_text())["claims"]
    return {f"{claim['name']}:{each['what']}": each for claim in claims for each in claim["findings"]}


def test_a_transport_without_sms_ends_while_every_sm_is_held(tmp_path):
    found = prove(tmp_path, "sm_free:host_staged,sm_free:local,contention:host_staged")
    assert found["sm_free:host_staged"]["status"] == "proven", found
    assert found["sm_free:local"]["status"] == "not tried"
    assert found["contention:host_staged"]["figures"], found


def test_training_transports_and_a_killed_rank(tmp_path):
    found = prove(tmp_path, "one_curve,same_bits,transports:copy_engine,killed_rank")
    assert {name: each["says"] for name, each in found.items() if each["status"] != "proven"} == {}
