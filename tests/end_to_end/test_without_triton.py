"""On a machine without Triton, as `make run` sets one up, every kind of model trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it fails, as where it is not installed
from freescale.app.run.train_run import train_run
from freescale.recipe import load_config
class Silent:
    def write(self, event): pass
    def close(self): pass
few = ["run.steps=1", "run.eval_every=0", "run.device=cpu", "run.tensorboard=false"]
small = ["synthetic.users=40", "synthetic.items=60", "data.global_batch=8", "model.dim=8", "model.heads=1"]
experts = ["ffn.kind=moe", "moe.experts=4", "moe.top_k=2"]
for n, keys in enumerate([[], ["model.kind=sasrec"], ["model.kind=llama"], experts]):
    config = load_config(None, [*few, *small, *keys, f"run.out={sys.argv[1]}/{n}"])
    train_run(config, resume="never", open_terminal=lambda total: Silent())
config = load_config(sys.argv[2], [*few, f"run.out={sys.argv[1]}/stu", "data.global_batch=4"])
train_run(config, resume="never", open_terminal=lambda total: Silent())
print("trained")
"""


def test_every_kind_of_model_trains_without_triton(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "mlperf_dlrmv4_small.yaml"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=110,
    )
    assert done.stdout.endswith("trained\n"), done.stderr[-2000:]
