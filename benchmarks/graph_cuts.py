"""What it costs a GPU to cut a step into CUDA graphs, and whether events inside one graph could take their place.

With postponed weight gradients (`pipeline.postpone=on`) a replayed step is many graphs: the forward is cut where it may
have to wait for sums of gradients, and gradients of weights are graphs behind which such sums begin.

1. Check, which says whether one graph could do it with events that stand in it:
   leaves    work on another stream begins when a replay has come to an event recorded in it, every time anew
   waits     a replay waits in its middle for an event that was recorded before its launch
   forgets   and not for one recorded behind its launch: hosts queue the next step while this one is computed
2. Microseconds a cut: graphs of four kernels, one behind the other, over one graph of all of them; the same with an
   event to wait for, which has long passed, or with a kernel of its own between two.
3. Milliseconds of AdamW over a model of eight layers of width 512: all weights at once, layer by layer, as recorded
   forwards do it (all counted at once, a kernel a layer), and layer by layer in so many parts that more of the GPU is
   busy (the library's kernel takes 65,536 numbers a block, and 36 tensors a launch where CUDA is older than 13).

    PYTHONPATH=. python benchmarks/graph_cuts.py [--ranks 4]    # ranks share the GPU, and measure at the same time
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freescale.comm.world import as_rank, join_ranks, launch, virtual_gpus
from freescale.train import update_only
from freescale.train.compute.update_if_due import UpdateIfDue

Layers = Sequence[Sequence[nn.Parameter]]
CUTS, KERNELS, ROUNDS = 16, 4, 15
LAYERS, DIM, POSITIONS = 8, 512, 8192
SHORT_MS, LONG_MS = 4.0, 20.0


def main() -> None:
    """Measure on one rank, or on several side by side; tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("graphs are measured on a GPU, and there is none here")
    if options.ranks == 1:
        conclude([measure(lambda: None)])
        return
    with tempfile.TemporaryDirectory() as folder, virtual_gpus(options.ranks) as shared:
        print(shared.message, file=sys.stderr)
        launch(
            [json.dumps({"folder": folder})],
            num_ranks=options.ranks,
            environment=shared.environment,
            program=(__file__,),
        )
        conclude([json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))])


def on_rank(folder: Path) -> None:
    """One of several."""
    with join_ranks(device="cuda") as ranks:
        (folder / f"{ranks.rank}.json").write_text(json.dumps(measure(ranks.barrier)))
        ranks.barrier()


def measure(meet: Callable[[], None]) -> dict[str, Any]:
    """Checks and times; `meet` waits for all ranks, which then measure the same."""
    found: dict[str, Any] = {}
    for name, check in (("leaves", leaves), ("waits, forgets", waits)):
        meet()
        try:
            found[name] = check()
        except (RuntimeError, TypeError) as error:  # a torch that knows no such events
            found[name] = str(error).splitlines()[0]
    meet()
    found["cut_us"] = cuts_us(meet)
    found["adamw_ms"] = adamw_ms(meet)
    return found


def cycles_a_ms() -> float:
    """What `torch.cuda._sleep` counts."""
    return 20_000_000 / timed(lambda: torch.cuda._sleep(20_000_000))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds by the GPU's clock, the host ahead."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended))


def recorded(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def leaves() -> str:
    """Whether another stream can begin in the middle of a replay."""
    a_ms, side = cycles_a_ms(), torch.cuda.Stream()
    middle = torch.cuda.Event(external=True)
    middle.record()

    def work() -> None:
        torch.cuda._sleep(int(SHORT_MS * a_ms))
        middle.record()
        torch.cuda._sleep(int(LONG_MS * a_ms))

    graph = recorded(work)
    for turn in range(3):
        began, there = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        side.wait_event(middle)
        there.record(side)
        torch.cuda.synchronize()
        at = began.elapsed_time(there)
        if not 0.7 * SHORT_MS < at < SHORT_MS + 0.5 * LONG_MS:
            return f"no: in turn {turn} after {at:.1f} ms, not {SHORT_MS:g}"
    return "yes"


def waits() -> str:
    """Whether a replay waits for what was recorded before its launch, and for nothing that came later."""
    a_ms, side = cycles_a_ms(), torch.cuda.Stream()
    ready = torch.cuda.Event(external=True)
    ready.record(side)

    def work() -> None:
        torch.cuda._sleep(int(SHORT_MS * a_ms))
        ready.wait()
        torch.cuda._sleep(int(a_ms))

    def recorded_after(ms: float) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(ms * a_ms))
            ready.record(side)

    graph = recorded(work)
    for turn in range(3):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        recorded_after(LONG_MS)
        graph.replay()
        ended.record()
        recorded_after(5 * LONG_MS)
        torch.cuda.synchronize()
        took = began.elapsed_time(ended)
        if took < 0.8 * LONG_MS:
            return f"no: in turn {turn} it did not wait ({took:.1f} ms, not {LONG_MS:g})"
        if took > 3 * LONG_MS:
            return f"no: in turn {turn} it waited for what was recorded behind its launch ({took:.1f} ms)"
    return "yes"


def cuts_us(meet: Callable[[], None]) -> dict[str, float]:
    """By what stands between two graphs."""
    numbers = torch.zeros(1 << 22, device="cuda")
    numbers.add_(1.0)
    passed = torch.cuda.Event()
    passed.record()

    def kernels(count: int) -> None:
        for _ in range(count):
            numbers.add_(1.0)

    whole = recorded(lambda: kernels(CUTS * KERNELS))
    with_more = recorded(lambda: kernels(CUTS * (KERNELS + 1) - 1))
    parts = [recorded(lambda: kernels(KERNELS)) for _ in range(CUTS)]

    def one_by_one(between: Callable[[], object]) -> None:
        for number, graph in enumerate(parts):
            if number:
                between()
            graph.replay()

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "a cut": (lambda: one_by_one(lambda: None), whole.replay),
        "with an event to wait for": (
            lambda: one_by_one(lambda: torch.cuda.current_stream().wait_event(passed)),
            whole.replay,
        ),
        "with a kernel between": (lambda: one_by_one(lambda: numbers.add_(1.0)), with_more.replay),
    }
    found = {}
    for name, (cut, together) in ways.items():
        meet()
        pairs = [(timed(cut), timed(together)) for _ in range(ROUNDS)]
        found[name] = 1000 * statistics.median(a - b for a, b in pairs) / (CUTS - 1)
    meet()
    found["a kernel, alone or between others"] = (
        1000 * statistics.median(timed(whole.replay) for _ in range(ROUNDS)) / (CUTS * KERNELS)
    )
    return found


def adamw_ms(meet: Callable[[], None]) -> dict[str, float]:
    """By how the weights are taken; checked first: the same bits."""
    ways: dict[str, Callable[[torch.optim.Optimizer, Layers], Callable[[], object]]] = {
        "at once": lambda optimizer, layers: optimizer.step,
        "layer by layer": lambda optimizer, layers: partial(by_layer, optimizer, layers),
        "layer by layer, as replayed": as_replayed,
        "layer by layer, in parts": lambda optimizer, layers: partial(in_parts, optimizer, layers),
    }
    found, bits = {}, []
    for name, way in ways.items():
        layers = made_up_layers()
        weights = [param for layer in layers for param in layer]
        rate = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, fused=True, capturable=True)
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.step()
        graph = recorded(way(optimizer, layers))
        graph.replay()
        torch.cuda.synchronize()
        bits.append([weight.detach().clone() for weight in weights])
        meet()
        found[name] = statistics.median(timed(graph.replay) for _ in range(ROUNDS))
    for other in bits[1:]:
        if not all(torch.equal(one, two) for one, two in zip(bits[0], other, strict=True)):
            raise SystemExit("FAILED: the same update in another order has other bits")
    return found


def made_up_layers() -> list[list[nn.Parameter]]:
    """Weights of a position table and of eight layers, with gradients."""
    torch.manual_seed(0)

    def made(*shape: int) -> nn.Parameter:
        param = nn.Parameter(torch.randn(*shape, device="cuda"))
        param.grad = torch.randn(*shape, device="cuda")
        return param

    each = [[made(DIM, 4 * DIM), made(DIM, DIM), made(DIM), made(4, 256)] for _ in range(LAYERS)]
    return [[made(POSITIONS, DIM)], *each]


def by_layer(optimizer: torch.optim.Optimizer, layers: Layers) -> None:
    """As a split step does it."""
    for layer in layers:
        update_only(optimizer, {param: grad for param in layer if (grad := param.grad) is not None})


def as_replayed(optimizer: torch.optim.Optimizer, layers: Layers) -> Callable[[], None]:
    """As a recorded forward does it, where the updates are due."""
    update = UpdateIfDue(optimizer)
    every = [param for layer in layers for param in layer]
    gradients = [{param: grad for param in layer if (grad := param.grad) is not None} for layer in layers]

    def work() -> None:
        update.count(every)
        for each in gradients:
            update.run(each)

    work()  # loads its kernels, and moves nothing
    update.tell(True)
    return work


def in_parts(optimizer: torch.optim.Optimizer, layers: Layers) -> None:
    """The library's kernel, given at most 36 parts of a layer, as one launch takes: each is a block of its own."""
    (group,) = optimizer.param_groups
    for layer in layers:
        size = sum(param.numel() for param in layer)
        part = max(4096, -(-size // ((36 - len(layer)) * 4)) * 4)
        lists: list[list[Tensor]] = [[] for _ in range(5)]
        steps = [optimizer.state[param]["step"] for param in layer]
        torch._foreach_add_(steps, 1)
        for param, step in zip(layer, steps, strict=True):
            state = optimizer.state[param]
            assert param.grad is not None
            kept = (param.detach(), param.grad, state["exp_avg"], state["exp_avg_sq"])
            parts = [tensor.view(-1).split(part) for tensor in kept]
            for own, pieces in zip(lists, parts):
                own.extend(pieces)
            lists[4].extend([step] * len(parts[0]))
        torch._fused_adamw_(
            *lists[:4],
            [],
            lists[4],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def conclude(found: list[dict[str, Any]]) -> None:
    """Tables, medians of the ranks, and everything as JSON."""
    for name in ("leaves", "waits, forgets"):
        print(f"{name}: {'; '.join(sorted({one[name] for one in found}))}")
    tables: dict[str, dict[str, float]] = {}
    for table, unit in (("cut_us", "us"), ("adamw_ms", "ms")):
        print(f"\n{table.rpartition('_')[0]}, {unit}; median of {len(found)} ranks (range)")
        tables[table] = {}
        for name in found[0][table]:
            values = [one[table][name] for one in found]
            tables[table][name] = statistics.median(values)
            print(f"  {name:<36} {tables[table][name]:8.3f}  ({min(values):.3f} to {max(values):.3f})")
    facts = {
        "hardware": torch.cuda.get_device_name(),
        "ranks": len(found),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": str(datetime.date.today()),
    }
    checks = {name: [one[name] for one in found] for name in ("leaves", "waits, forgets")}
    print(json.dumps({"claim": "graph_cuts", **tables, "checks": checks, **facts}))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        as_rank(lambda: on_rank(Path(json.loads(sys.argv[1])["folder"])))
    else:
        main()
