"""HSTU-MoE against dense HSTU on MovieLens-1M: HR@10 at half the active feed-forward work, and experts left unused.

    python benchmarks/moe_quality.py --data ml-1m.txt [--seeds 3] [--at-once 4] [--only dense,moe] [--quick]

All sides have the recipe recipes/ml1m_hstu_moe.yaml, the same data, batches, negatives and number of epochs:

    none         HSTU as it is, without a feed-forward part
    dense        a dense part four times as wide as the model
    dense_half   one half as wide: about the active work of those below
    moe          8 experts, two a token, each a little narrower than the model: with its router less than half the
                 active work of dense
    moe_fine     16 experts, four a token, half as wide: no more active work
    moe_aux      as moe, balanced by the auxiliary loss instead of biases
    moe_free     as moe, not balanced at all

HR@10 of the best checkpoint on the test targets, full ranking, seen items filtered. Active work counts the products of
the feed-forward part that a token takes part in, forward and backward. Dead experts are those that no token of an
epoch went to, over both layers. `--quick` trains small models for a few epochs on a CPU: it shows that everything
runs, not how good it is. Runs go on where they were stopped: `--out` keeps them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from freescale.data.preparing.preparation import prepare
from freescale.data.stored.manifest import is_dataset
from freescale.kernels.moe import reference
from freescale.kernels.moe.api import expert_mlp
from freescale.recipe import load_config

RECIPE = Path(__file__).parents[1] / "recipes" / "ml1m_hstu_moe.yaml"
QUICK = ("model.dim=32", "data.max_length=50", "head.num_negatives=64", "run.epochs=3", "run.patience=null")


def sides(dim: int) -> dict[str, tuple[str, ...]]:
    """What each side changes in the recipe."""
    no_moe = ("moe.experts=8", "moe.top_k=2")
    experts = ("ffn.kind=moe", f"ffn.hidden={dim - 8}")
    return {
        "none": ("ffn.kind=none", *no_moe),
        "dense": ("ffn.kind=dense", f"ffn.hidden={4 * dim}", *no_moe),
        "dense_half": ("ffn.kind=dense", f"ffn.hidden={2 * dim}", *no_moe),
        "moe": experts,
        "moe_fine": ("ffn.kind=moe", f"ffn.hidden={dim // 2 - 8}", "moe.experts=16", "moe.top_k=4"),
        "moe_aux": (*experts, "moe.bias_rate=0", "moe.aux_loss=0.01"),
        "moe_free": (*experts, "moe.bias_rate=0"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="ml-1m.txt, or a prepared folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time (on one GPU: start CUDA MPS)")
    parser.add_argument("--only", default="", help="names of sides, separated by commas")
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one unless given")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run")
    options = parser.parse_args()
    check()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, options.out or Path(folder))


def check() -> None:
    """The experts as they will be computed, against one expert at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x, w_in, w_out = (
        torch.randn(*shape, generator=generator).to(device).requires_grad_()
        for shape in ((500, 64), (8, 128, 64), (8, 64, 64))
    )
    weights = torch.rand(500, 2, generator=generator).to(device)
    experts = torch.rand(500, 8, generator=generator).topk(2).indices.to(device)
    ours, truth = (f(x, weights, experts, w_in, w_out) for f in (expert_mlp, reference.expert_mlp))
    error = ((ours - truth).norm() / truth.norm()).item()
    grads = [torch.autograd.grad(y.square().sum(), (x, w_in, w_out)) for y in (ours, truth)]
    error = max(error, *(((a - b).norm() / b.norm()).item() for a, b in zip(*grads)))
    if not error < 5e-3:
        raise SystemExit(f"experts are wrong: relative error {error:.1e}")
    print(f"experts against one at a time on {device}: relative error {error:.1e}", flush=True)


def measure(options: argparse.Namespace, out: Path) -> None:
    """Run every side with every seed, print the table and the JSON line."""
    data = options.data if is_dataset(options.data) else out / "data"
    if not is_dataset(data):
        prepare(options.data, data)
    common = (f"data.path={data}", *(QUICK if options.quick else ()), *options.overrides)
    changes = sides(load_config(RECIPE, common).model.dim)
    names = [name for name in changes if not options.only or name in options.only.split(",")]
    jobs = [(name, seed) for seed in range(1, options.seeds + 1) for name in names]

    def job(task: tuple[str, int]) -> dict[str, Any]:
        name, seed = task
        folder = out / f"{name}-{seed}"
        result = train((*common, *changes[name], f"run.seed={seed}", f"run.out={folder}"), folder)
        print(
            f"{name:>10} seed {seed}", {k: v for k, v in result.items() if k != "dead_by_epoch"}, flush=True
        )
        return {"side": name, "seed": seed, **result}

    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(job, jobs))
    table = [row_of(name, [one for one in results if one["side"] == name]) for name in names]
    columns = list(table[0])
    print("\n" + "  ".join(f"{column:>16}" for column in columns))
    for row in table:
        print("  ".join(f"{row[column]!s:>16}" for column in columns))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"device": device, "torch": torch.__version__, "table": table, "runs": results}))


def train(overrides: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """One run in a process of its own; what its log says."""
    command = [sys.executable, "-m", "freescale", "train", str(RECIPE), *overrides]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w") as log:
        if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
            raise SystemExit(f"{' '.join(command)} failed: see {log.name}")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    test = next(e for e in reversed(events) if e["event"] == "eval" and e.get("split") == "test")
    load = [e for e in events if e["event"] == "experts"]
    steps = [e["step_ms"] for e in events if e["event"] == "step" and e.get("step_ms")]
    config = load_config(RECIPE, overrides)
    return {
        "hr@10": round(test["hr@10"], 4),
        "ndcg@10": round(test["ndcg@10"], 4),
        "active_mflop": round(active_flops(config) / 1e6, 3),
        "step_ms": round(statistics.median(steps), 2),
        "dead_at_end": load[-1]["expert_dead"] if load else None,
        "max_load_at_end": round(load[-1]["expert_max"], 3) if load else None,
        "entropy_at_end": round(load[-1]["expert_entropy"], 4) if load else None,
        "dead_by_epoch": [e["expert_dead"] for e in load],
    }


def active_flops(config: Any) -> int:
    """Of the feed-forward parts of all layers, a token, forward and backward; routers included."""
    if config.ffn.kind == "none":
        return 0
    dim, width = config.model.dim, config.ffn.hidden
    products = 3 if config.ffn.activation == "swiglu" else 2
    if config.ffn.kind == "dense":
        return 3 * 2 * products * dim * width * config.model.layers
    active = products * width * (config.moe.top_k + config.moe.shared) + config.moe.experts
    return 3 * 2 * dim * active * config.model.layers


def row_of(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: means over the seeds; the worst of them for dead experts."""

    def mean(key: str, digits: int) -> float:
        return round(statistics.mean(run[key] for run in runs), digits)

    has_experts = runs[0]["dead_at_end"] is not None
    return {
        "side": name,
        "HR@10": mean("hr@10", 4),
        "lowest": min(run["hr@10"] for run in runs),
        "highest": max(run["hr@10"] for run in runs),
        "NDCG@10": mean("ndcg@10", 4),
        "active MFLOP": runs[0]["active_mflop"],
        "ms a step": mean("step_ms", 2),
        "dead at the end": max(run["dead_at_end"] for run in runs) if has_experts else "-",
        "max load": mean("max_load_at_end", 3) if has_experts else "-",
    }


if __name__ == "__main__":
    main()
