"""What keyed dropout costs beside torch's: a training step on the CPU, one site forward and backward on a GPU.

CPU: one run of the default recipe in which steps draw keyed masks and torch's in turn. The masks are the only
difference; which turn begins changes from pair to pair. GPU: both in one process, in turns, three rounds; host time and
the GPU's own time, which is that of a recorded graph of many calls.
Checked first: the masks of the loops, and of the kernel on a GPU, are those of the reference.

    python benchmarks/keyed_dropout.py [--steps 300] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.comm.world.ranks import Ranks
from freescale.kernels.dropout import Masked, dropout, masked, reference
from freescale.model import Dropout
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress

P = 0.2
SHAPES = {"cuda": ((47_000, 512), (9_000, 64)), "cpu": ((9_000, 64), (1_500, 64))}
CALLS, ROUNDS, WARM_UP = 50, 3, 20


def check(device: str) -> None:
    """Masks and scaled numbers of the reference, bit by bit."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, keys = torch.randn(301, 70).to(dtype), torch.randint(2**62, (301,))
        ours = dropout(x.to(device), masked(keys.to(device), p=P, site=3)).cpu()
        assert torch.equal(ours, reference.dropout(x, *masked(keys, p=P, site=3))), (device, dtype)


@contextmanager
def torch_masks() -> Iterator[None]:
    """Every site calls torch's dropout, and no key is made."""
    no_keys = torch.zeros(0, dtype=torch.int64)

    def mask(self: Dropout, shape: torch.Size, keys: Tensor | None = None) -> Masked | None:
        return Masked(no_keys, 0, 0, self.p) if self.training and self.p else None

    def plain(x: Tensor, drawn: Masked) -> Tensor:
        return F.dropout(x, drawn.scale)

    with (
        mock.patch.object(Dropout, "mask", mask),
        mock.patch("freescale.model.parts.dropout.dropout", plain),
        mock.patch("freescale.kernels.hstu.reference.dropout", plain),
    ):
        yield


class Silent:
    """Keeps no events."""

    def write(self, event: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


def steps_on_cpu(steps: int, keys: list[str]) -> dict[str, float]:
    """Milliseconds of 1,000 tokens of a step, of the clock and of all cores, for both masks: one run, in turns."""
    out = tempfile.mkdtemp()
    config = load_config(None, [*keys, "run.device=cpu", f"run.steps={steps + WARM_UP}", f"run.out={out}"])
    run = build_run(config, build_source(config), Ranks(0, 1, torch.device("cpu")), Progress([Silent()]))
    times: dict[str, list[float]] = defaultdict(list)
    with run.open_schedule(0) as schedule:
        for number, ready in zip(range(steps + WARM_UP), schedule):
            kind = ("keyed", "torch")[(number + number // 2) % 2]
            began, worked = time.perf_counter(), time.process_time()
            if kind == "keyed":
                run.train_step.run(ready, schedule)
            else:
                with torch_masks():
                    run.train_step.run(ready, schedule)
            if number >= WARM_UP:
                wall, cpu = time.perf_counter() - began, time.process_time() - worked
                thousands = ready.batch.num_tokens / 1000  # no two batches are of one size
                times[f"{kind}_ms"].append(1000 * wall / thousands)
                times[f"{kind}_cpu_ms"].append(1000 * cpu / thousands)
    found = {kind: statistics.median(each) for kind, each in times.items()}
    ratios = {f"ratio{part}": found[f"keyed{part}_ms"] / found[f"torch{part}_ms"] for part in ("", "_cpu")}
    return {**found, **ratios}


def sites(shape: tuple[int, int], device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Forward and backward of one site, keyed and torch's."""
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    grad = torch.randn(shape, device=device).to(dtype)
    mask = masked(torch.randint(2**62, shape[:1], device=device), p=P, site=3)
    return {
        "keyed": lambda: torch.autograd.grad(dropout(x, mask), x, grad),
        "torch": lambda: torch.autograd.grad(F.dropout(x, P), x, grad),
    }


def recorded(call: Callable[[], Any]) -> Callable[[], None]:
    """CALLS of it as one graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def us_a_call(call: Callable[[], Any], calls: int, sync: Callable[[], None]) -> float:
    call()
    sync()
    began = time.perf_counter()
    call()
    sync()
    return 1e6 * (time.perf_counter() - began) / calls


def measure_sites(device: str) -> list[dict[str, Any]]:
    """Microseconds of forward and backward of a site, median and range of the rounds."""
    on_gpu = device == "cuda"
    sync = torch.cuda.synchronize if on_gpu else lambda: None
    table = []
    for shape in SHAPES[device]:
        for dtype in (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,):
            calls = sites(shape, device, dtype)

            def many(call: Callable[[], Any]) -> Callable[[], None]:
                return lambda: [call() for _ in range(CALLS)] and None

            timed = {kind: recorded(call) if on_gpu else many(call) for kind, call in calls.items()}
            row: dict[str, Any] = {"shape": f"{shape[0]} x {shape[1]}", "dtype": str(dtype)[6:]}
            for name, these in [("device", timed)] + (
                [("eager", {k: many(c) for k, c in calls.items()})] * on_gpu
            ):
                rounds = [{k: us_a_call(c, CALLS, sync) for k, c in these.items()} for _ in range(ROUNDS)]
                for kind in these:
                    found = sorted(each[kind] for each in rounds)
                    row[f"{kind}_{name}_us"] = found[ROUNDS // 2]
                    row[f"{kind}_{name}_range"] = [found[0], found[-1]]
            table.append(row)
    return table


def show(row: dict[str, Any]) -> None:
    cells = [f"{name} {value:.1f}" for name, value in row.items() if isinstance(value, float)]
    print(f"{row['shape']:>12} {row['dtype']:>9}  " + "  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of the run on the CPU; 0: none")
    parser.add_argument("keys", nargs="*")
    options = parser.parse_args()
    answer: dict[str, Any] = {"torch": torch.__version__, "machine": platform.machine()}
    check("cpu")
    print("masks are those of the reference")
    if options.steps:
        answer["step"] = steps_on_cpu(options.steps, options.keys)
        print("1,000 tokens on the CPU:", "  ".join(f"{k} {v:.3f}" for k, v in answer["step"].items()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        check("cuda")
        answer["gpu"] = torch.cuda.get_device_name()
    answer["sites"] = measure_sites(device)
    for row in answer["sites"]:
        show(row)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
