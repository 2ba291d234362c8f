"""Requests with candidates on a GPU: exact in half precision, milliseconds a request with and without a cache, steps.

    python benchmarks/ranking_requests.py            H200, about 80 s; --tiny runs the same code on a CPU in seconds
    python benchmarks/ranking_requests.py --cpu      training steps on one CPU thread, by CPU time

Checks first: candidates in one bf16 pass against single passes in float64, forward and gradients, and scores from a
cache against those without. Then times of an HSTU (5 layers, width 512, 4 heads, both biases) under autocast, in three
rounds, contenders in turn: "GPU" is a pass alone, replayed as a CUDA graph; "request" is all that a request costs from
vectors to states, tables of the kernels and the host's work included. With --cpu: training steps alone, in float32, of
an encoder of 3 layers and width 64, 32 requests of 256 events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention
from freescale.model import HSTU
from freescale.model.serving.candidate_graph import CandidateGraph
from freescale.model.serving.history_cache import HistoryCaches, candidate_states, extend_caches
from freescale.model.serving.history_store import HistoryStore
from freescale.model.views.cached_view import CachedView
from freescale.model.views.request_view import request_view, target_states


def requests_of(sizes: list[tuple[int, int]], *, dim: int, device: str, seed: int = 0) -> SequenceBatch:
    """Requests of so many events and candidates, with vectors and times."""
    draw = torch.Generator().manual_seed(seed)
    times = []
    for n, k in sizes:
        own = torch.randint(1, 5000, (n + 1,), generator=draw).cumsum(0)
        times.append(torch.cat([own[:n], own[n:].expand(k)]))
    asked = torch.cat([torch.cat([own[1:], own[-1:]]) for own in times])
    vectors = torch.randn(sum(n + k for n, k in sizes), dim, generator=draw) * 0.1
    batch = SequenceBatch(
        offsets=torch.tensor([0, *(n + k for n, k in sizes)]).cumsum(0),
        tokens={"vector": vectors, "time": torch.cat(times), "target_time": asked},
        samples={"row": torch.arange(len(sizes))},
        targets=torch.tensor([k for _, k in sizes]),
    )
    return batch.to(device)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    got, wanted = (x.detach().double().cpu() for x in (got, wanted))
    return float((got - wanted).norm() / wanted.norm())


def check_attention(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of output and gradients of k candidates in one pass, against single passes in float64."""
    sizes, width = [(150, 70), (0, 3), (64, 1), (30, 17)], 32
    draw = torch.Generator().manual_seed(0)
    tokens = sum(n + k for n, k in sizes)
    leaves = [torch.randn(tokens, 2, width, generator=draw, dtype=torch.float64) for _ in range(3)]
    leaves += [torch.randn(151, generator=draw, dtype=torch.float64) for _ in range(2)]
    times = torch.randint(0, 9000, (tokens,), generator=draw).cumsum(0)

    def attend(own: list[Tensor], index: Tensor, parts: list[tuple[int, int]], where: str) -> Tensor:
        q, k, v = (x[index.to(x.device)] for x in own[:3])
        return hstu_attention(
            q, k, v, torch.tensor([0, *(n + k for n, k in parts)]).cumsum(0),
            scale=1 / 64, alpha=0.2, position_bias=own[3], time_bias=own[4],
            key_time=times[index].to(where), query_time=(times[index] + 99).to(where),
            mask=AttentionMask(window=120, targets=torch.tensor([k for _, k in parts])),
        )  # fmt: skip

    edges, index, parts, rows = 0, [], [], []
    for n, k in sizes:
        for c in range(k):
            rows.append((edges + n + c, sum(a + b for a, b in parts) + n))
            index += [*range(edges, edges + n), edges + n + c]
            parts.append((n, 1))
        edges += n + k
    target = torch.tensor([a for a, _ in rows])
    exact = [x.clone().requires_grad_() for x in leaves]
    alone = attend(exact, torch.tensor(index), parts, "cpu")[torch.tensor([b for _, b in rows])]
    weight = torch.linspace(-1, 1, alone.numel(), dtype=torch.float64).view_as(alone)
    wanted = [alone, *torch.autograd.grad(alone, exact, weight)]
    single = torch.float32
    mine = [x.to(device, dtype).requires_grad_() for x in leaves[:3]]
    mine += [x.to(device, single).requires_grad_() for x in leaves[3:]]
    out = attend(mine, torch.arange(tokens), sizes, device)[target.to(device)]
    got = [out, *torch.autograd.grad(out, mine, weight.to(device, dtype))]
    names = ("output", "dq", "dk", "dv", "d_position", "d_time")
    return {name: relative(a, b) for name, a, b in zip(names, got, wanted, strict=True)}


def timed_ms(run: Callable[[], Any], *, device: str, repeats: int, rounds: int = 3) -> list[float]:
    """Milliseconds of some rounds."""
    found = []
    for _ in range(rounds):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / repeats)
        else:
            start = time.process_time()  # others may have the cores
            for _ in range(repeats):
                run()
            found.append((time.process_time() - start) / repeats * 1e3)
    return found


def replayed(run: Callable[[], Tensor], device: str) -> Callable[[], Any]:
    """The pass as a CUDA graph, warmed up."""
    if device != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def serving(
    encoder: HSTU, *, events: int, users: int, shown: int, dim: int, device: str
) -> list[dict[str, Any]]:
    """Times of requests without a cache and with one, in turn: of the GPU, and with all that the host does."""
    batch = requests_of([(events, shown)] * users, dim=dim, device=device)
    layout = SequenceLayout(batch.offsets, device=device)
    keep, ask = [], []
    for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()):
        keep += range(start, stop - shown - 1)
        ask += range(stop - shown - 1, stop)
    old, new = (_part(batch, index, users) for index in (keep, ask))
    asked = SequenceBatch(
        offsets=new.offsets, tokens=new.tokens, targets=torch.full((users,), shown, dtype=torch.int64)
    )
    vectors, own = batch.tokens["vector"], asked.tokens["vector"]
    # Without a GPU the interpreter runs the kernels, which knows no bfloat16.
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)
    with torch.no_grad(), half:
        view = request_view(batch, layout, None)
        caches = extend_caches(encoder, old.tokens["vector"], old)
        packed = HistoryCaches(caches, device=torch.device(device))
        cached = CachedView(asked, packed, device=torch.device(device))
        store = HistoryStore(caches[0], users=users, events=events - 1, device=torch.device(device))
        for place, cache in enumerate(caches):
            store.put(place, cache)
        record = None if device == "cuda" else (lambda run: run)
        graph = CandidateGraph(encoder, store, users=users, candidates=shown, dim=dim, record=record)
        places = range(users)
        wanted = encoder.encode_targets(vectors, view)
        found = graph.states(own, asked, places)
        assert relative(found, wanted) < 2e-2, relative(found, wanted)
        runs: dict[str, Callable[[], Any]] = {
            "whole history, GPU": replayed(lambda: encoder.encode_targets(vectors, view), device),
            "cached, GPU": replayed(lambda: encoder.encode(own, cached), device),
            "whole history, request": lambda: target_states(
                encoder, vectors, batch, SequenceLayout(batch.offsets, device=device)
            ),
            "cached, request": lambda: graph.states(own, asked, places),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(3):
            for name, run in runs.items():
                times[name] += timed_ms(run, device=device, repeats=10, rounds=1)
    sizes = {"events": events, "users": users, "candidates": shown}
    return [{**sizes, "what": name, "rounds_ms": ms} for name, ms in times.items()]


def _part(batch: SequenceBatch, index: list[int], users: int) -> SequenceBatch:
    where = torch.tensor(index, device=batch.device)
    each = len(index) // users
    tokens = {name: values.index_select(0, where) for name, values in batch.tokens.items()}
    return SequenceBatch(offsets=torch.arange(users + 1) * each, tokens=tokens)


def training(encoder: HSTU, *, events: int, users: int, shown: int, dim: int, device: str) -> dict[str, Any]:
    """Forward and backward of a batch of requests: with a short last layer, and with a whole one."""
    batch = requests_of([(events, shown)] * users, dim=dim, device=device)
    layout = SequenceLayout(batch.offsets, device=device)
    view, vectors = request_view(batch, layout, None), batch.tokens["vector"].requires_grad_()
    found: dict[str, Any] = {"events": events, "users": users, "candidates": shown}

    def short() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            states = encoder.encode_targets(vectors, view, short=True)
        states.square().sum().backward()

    def whole() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            states = encoder.encode(vectors, view).index_select(0, view.target_index)
        states.square().sum().backward()

    for run in (short, whole):
        run()
    # Side by side, in turn.
    rounds = [
        (
            *timed_ms(short, device=device, repeats=3, rounds=1),
            *timed_ms(whole, device=device, repeats=3, rounds=1),
        )
        for _ in range(3)
    ]
    found |= {"short_ms": [a for a, _ in rounds], "whole_ms": [b for _, b in rounds]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--cpu", action="store_true", help="training steps on one CPU thread")
    parser.add_argument("--parts", nargs="*", default=["serving", "steps"], help="what is timed")
    args = parser.parse_args()
    tiny = args.tiny
    if tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported
    if args.cpu:
        torch.set_num_threads(1)
        args.parts = ["steps"]
    device = "cpu" if tiny or args.cpu else "cuda"
    began = time.perf_counter()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    errors = {str(dtype).removeprefix("torch."): check_attention(device, dtype)}
    print(
        f"one pass against single passes in float64 ({time.perf_counter() - began:.0f} s):",
        errors,
        flush=True,
    )
    assert all(error < 2e-2 for each in errors.values() for error in each.values()), errors
    dim, layers, heads = (16, 2, 2) if tiny else (64, 3, 4) if args.cpu else (512, 5, 4)
    lengths, most = ([6, 20], 7) if tiny else ([256], 1000) if args.cpu else ([1024, 4096], 1000)
    torch.manual_seed(0)
    encoder = (
        HSTU(dim=dim, layers=layers, heads=heads, max_length=max(lengths) + 2, time_bias=True)
        .to(device)
        .eval()
    )
    # Float32, no autocast: a cache and chunks against one pass.
    batch = requests_of([(20, 9), (1, 3)], dim=dim, device=device)
    vectors = batch.tokens["vector"]
    with torch.no_grad():
        once = target_states(encoder, vectors, batch, SequenceLayout(batch.offsets, device=device))
        chunked = candidate_states(encoder, vectors, batch, chunk=4)
    errors["cached, chunks, float32"] = {"states": relative(chunked, once)}
    print(f"cached and in chunks against one pass ({time.perf_counter() - began:.0f} s):", errors, flush=True)
    assert relative(chunked, once) < 5e-3
    table = []
    for events in lengths if "serving" in args.parts else ():
        for users in (1, 8):
            for row in serving(encoder, events=events, users=users, shown=most, dim=dim, device=device):
                middle = statistics.median(row["rounds_ms"])
                row["ms_per_1000_candidates"] = middle / (row["users"] * row["candidates"]) * 1000
                table.append(row)
                rounds = ", ".join(f"{x:.3f}" for x in row["rounds_ms"])
                what = f"{events:5} events, {users} x {most} candidates, {row['what']:22}"
                print(f"{what}: {middle:8.3f} ms ({rounds})", flush=True)
    print(f"training ({time.perf_counter() - began:.0f} s)", flush=True)
    encoder.train()
    steps = []
    for shown in (1, 10, 100) if "steps" in args.parts else ():
        row = training(
            encoder, events=lengths[0], users=32 if not tiny else 2, shown=shown, dim=dim, device=device
        )
        steps.append(row)
        print(f"k = {shown:3}: short {row['short_ms']}, whole {row['whole_ms']} ms", flush=True)
    print(f"done in {time.perf_counter() - began:.0f} s")
    print(json.dumps({"errors": errors, "requests": table, "steps": steps, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
