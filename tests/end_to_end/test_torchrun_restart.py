"""torchrun restarts the ranks of two nodes over the store it keeps: the run resumes from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.comm.world import free_port
from tests.comm.world.by_hand import until

REPOSITORY = Path(__file__).parents[2]


def agent(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """One of two nodes."""
    words = (
        f"--nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
        f" -m freescale train run.out={folder / 'run'} run.steps=120 run.checkpoint_every=20 run.eval_every=120"
        " model.dim=16 run.device=cpu"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words.split()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def rank_of(node: subprocess.Popen[bytes]) -> int:
    """The process that trains under an agent."""
    return int(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_of_another_node_is_restarted_and_resumes(tmp_path):
    port, nodes = free_port(), []
    try:
        nodes += [agent(tmp_path, port), agent(tmp_path, port)]
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000020"
        assert until(checkpoint.exists, 200)
        os.kill(rank_of(nodes[1]), signal.SIGKILL)
        assert [node.wait(300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                node.wait(60)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line.get("event") == "step"]
    assert steps[-1] == 120
    assert steps == sorted(set(steps))
