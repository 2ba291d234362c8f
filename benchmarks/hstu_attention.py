"""HSTU attention on a GPU: time, TFLOP/s and errors, beside the kernels of generative-recommenders and flex_attention.

    PYTHONPATH=. python benchmarks/hstu_attention.py [--peer DIR] [--rounds 5] [--part attention layer step]

`--peer DIR` names a checkout of generative-recommenders; its kernels need neither fbgemm nor torchrec. All contenders
take turns, round after round; the table has medians. A turn is eight forwards and one backward through all of them,
as the layers of a model have it, divided by eight. FLOPs are those of the causal half: forward 2 H D sum(L^2),
backward 5 H D sum(L^2). What a contender cannot run is reported with its reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from gpu_time import ms_a_call
from torch import Tensor

from freescale import ShardedEmbedding, TableSpec
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.embedding import RowwiseAdagrad
from freescale.kernels import SequenceLayout, hstu_attention, softmax_attention
from freescale.kernels.attention import reference
from freescale.model.encoders.hstu import HSTU, HSTULayer
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender
from freescale.model.views.view import BatchView

PEAK_TFLOPS = 989.4  # dense bfloat16, NVIDIA's data sheet for H100 and H200 SXM
CALLS = 8
Call = Callable[[], Any]


def long_tail(num: int, tokens: int, longest: int, sum_of_squares: float | None = None) -> Tensor:
    """Lengths with this sum, cut at `longest`; the weight of the tail is chosen to meet the sum of squares."""

    def drawn(power: float) -> Tensor:
        spread = (-torch.log1p(-(torch.arange(num) + 0.5) / num)) ** power
        low, high = 0.0, float(longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if (spread * middle).clamp(1, longest).sum() < tokens else (low, middle)
            )
        return (spread * low).clamp(1, longest).long()

    low, high = 0.2, 6.0
    for _ in range(40 if sum_of_squares else 0):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if drawn(middle).double().square().sum() < sum_of_squares else (low, middle)
        )
    lengths = drawn(low if sum_of_squares else 1.6)
    return lengths[torch.randperm(num, generator=torch.Generator().manual_seed(0))]


CASES = {
    "tail 2048, 4 x 64": (long_tail(128, 47_529, 2048, 42.2e6), 4, 64),
    "32 x 4096, 4 x 64": (torch.full((32,), 4096), 4, 64),
    "32 x 4096, 4 x 128": (torch.full((32,), 4096), 4, 128),
    "tail 4096, 4 x 128": (long_tail(128, 80_000, 4096), 4, 128),
    "32 x 4096, 4 x 256": (torch.full((32,), 4096), 4, 256),
}


def take_turns(calls: dict[str, Call], *, rounds: int, repeats: int = 10) -> dict[str, float]:
    """Median milliseconds of each call; they take turns so that a noisy moment meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(ms_a_call(call, repeats))
    return {name: statistics.median(values) for name, values in times.items()}


class Case:
    """One shape with its inputs on the GPU."""

    def __init__(self, lengths: Tensor, heads: int, width: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths, self.heads, self.width = lengths, heads, width
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.on_gpu = self.offsets.cuda()
        self.layout = SequenceLayout(self.offsets, device="cuda")
        tokens = int(self.offsets[-1])
        shape = (tokens, heads, width)
        self.q, self.k, self.v = (
            torch.randn(shape, generator=draw).cuda().bfloat16().requires_grad_() for _ in range(3)
        )
        self.grad = torch.randn(shape, generator=draw).cuda().bfloat16()
        gaps = (torch.empty(tokens).exponential_(generator=draw) ** 2 * 5000).long().cuda()
        self.times = {"key_time": gaps.cumsum(0), "query_time": gaps.cumsum(0) + gaps.roll(-1)}
        self.position = torch.randn(int(lengths.max()), generator=draw).cuda().requires_grad_()
        self.time = torch.randn(reference.NUM_TIME_BUCKETS, generator=draw).cuda().requires_grad_()
        self.squares = float(lengths.double().square().sum())
        self.alpha, self.scale = width**-0.5, 1 / float(lengths.max())

    def tflops(self, ms: float, units: int = 7) -> float:
        """Rate at this time; 7 units are forward and backward, 2 the forward."""
        return units * self.heads * self.width * self.squares / ms / 1e9

    def _turn(
        self, attend: Callable[..., Tensor], extra: tuple[Tensor, ...] = (), *, backward: bool = True
    ) -> Call:
        """CALLS forwards and one backward through all of them, as the layers of a model have it."""
        sets = [[x.detach().requires_grad_() for x in (self.q, self.k, self.v, *extra)] for _ in range(CALLS)]

        def call() -> Any:
            with torch.set_grad_enabled(backward):
                outs = [attend(*inputs) for inputs in sets]
            if not backward:
                return outs[0]
            with torch.autograd.set_multithreading_enabled(False):
                grads = torch.autograd.grad(outs, [x for inputs in sets for x in inputs], [self.grad] * CALLS)
            return grads[:3]

        return call

    def ours(self, *, bias: bool = False, backward: bool = True) -> Call:
        """Our kernel, with or without both biases."""

        def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
            options: dict[str, Any] = {"scale": self.scale, "alpha": self.alpha, "layout": self.layout}
            if tables:
                options |= {"position_bias": tables[0], "time_bias": tables[1], **self.times}
            return hstu_attention(q, k, v, self.offsets, **options)

        return self._turn(attend, (self.position, self.time) if bias else (), backward=backward)

    def softmax(self) -> Call:
        """Our softmax attention."""
        return self._turn(
            lambda q, k, v: softmax_attention(q, k, v, self.offsets, scale=self.alpha, layout=self.layout)
        )

    def peer(self) -> Call:
        """The Triton kernel of generative-recommenders, with the setting of its own benchmark."""
        from generative_recommenders.ops.triton.triton_hstu_attention import triton_hstu_mha

        longest = int(self.lengths.max())
        return self._turn(
            lambda q, k, v: triton_hstu_mha(longest, self.alpha, q, k, v, self.on_gpu, sort_by_length=True)
        )

    def flex(self) -> Call:
        """flex_attention knows softmax only; sequences are documents of one long row."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        tokens = len(self.q)
        document = torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths).cuda()
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
            None,
            None,
            tokens,
            tokens,
            device="cuda",
        )
        compiled = torch.compile(flex_attention, dynamic=False)

        def attend(*inputs: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in inputs)
            return compiled(q, k, v, block_mask=mask, scale=self.alpha).squeeze(0).transpose(0, 1)

        return self._turn(attend)


def tried(name: str, make: Callable[[], Call], missing: dict[str, str]) -> dict[str, Call]:
    """The call, if it can be made and run once; otherwise the reason goes into `missing`."""
    try:
        call = make()
        call()
        torch.cuda.synchronize()
    except Exception as error:
        missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        return {}
    return {name: call}


def errors(case: Case, call: Call, *, sequences: int = 6) -> float:
    """Largest relative error of dq, dk, dv against float64, on the first sequences."""
    stop = int(case.offsets[sequences])
    wide = [x.detach()[:stop].double().requires_grad_() for x in (case.q, case.k, case.v)]
    out = reference.hstu_attention(*wide, case.offsets[: sequences + 1], scale=case.scale, alpha=case.alpha)
    truth = torch.autograd.grad(out, wide, case.grad[:stop].double())
    return max(float((a[:stop].double() - b).norm() / b.norm()) for a, b in zip(call(), truth))


def attention(args: argparse.Namespace) -> dict[str, Any]:
    result = {}
    print(f"{'case':20} {'contender':26} {'f+b ms':>9} {'TFLOP/s':>8} {'of ours':>8}")
    for name, shape in CASES.items():
        case = Case(*shape)
        missing: dict[str, str] = {}
        calls = {"ours": case.ours(), "ours, position + time bias": case.ours(bias=True)}
        calls |= {"ours, softmax": case.softmax(), "ours, forward only": case.ours(backward=False)}
        error = errors(case, calls["ours"])
        if not error < 0.01:
            raise SystemExit(f"{name}: gradients are off by {error}")
        if args.peer and not ("tail 4096" in name or "256" in name):
            calls |= tried("generative-recommenders", case.peer, missing)
        elif args.peer:
            missing["generative-recommenders"] = "left out: crashes or tunes for minutes on this shape"
        if args.flex:
            calls |= tried("flex_attention (softmax)", case.flex, missing)
        times = {name: ms / CALLS for name, ms in take_turns(calls, rounds=args.rounds, repeats=3).items()}
        for contender, ms in times.items():
            units = 2 if "forward" in contender else 7
            print(
                f"{name:20} {contender:26} {ms:9.3f} {case.tflops(ms, units):8.0f} {ms / times['ours']:8.2f}"
            )
        for contender, why in missing.items():
            print(f"{name:20} {contender:26} {why}")
        peer_error = (
            errors(case, calls["generative-recommenders"]) if "generative-recommenders" in calls else None
        )
        print(
            f"{name:20} error against float64: ours {error:.1e}, peer {peer_error or math.nan:.1e}",
            flush=True,
        )
        result[name] = {
            "tokens": int(case.offsets[-1]),
            "sum_of_squares": case.squares,
            "ms": {k: round(v, 4) for k, v in times.items()},
            "tflops": round(case.tflops(times["ours"])),
            "error": error,
            "peer_error": peer_error,
            "missing": missing,
        }
    return result


def layer(args: argparse.Namespace) -> dict[str, Any]:
    """A whole layer of width 256 on the first case, both in bf16."""
    lengths, heads, _ = CASES["tail 2048, 4 x 64"]
    case = Case(lengths, heads, 64)
    x = torch.randn(len(case.q), 256, device="cuda").bfloat16().requires_grad_()
    out_grad = torch.randn_like(x)
    batch: Any = SimpleNamespace(offsets=case.offsets, tokens={})
    view = BatchView(batch, case.layout)
    own = HSTULayer(
        dim=256, heads=4, max_length=2048, dropout=0.0, position_bias=False, time_bias=False
    ).cuda()

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return own(x, view, 0)

    forwards: dict[str, tuple[Call, Tensor]] = {"ours": (forward, out_grad)}
    missing: dict[str, str] = {}
    if args.peer:
        calls = tried("generative-recommenders", lambda: _peer_layer(case), missing)
        forwards |= {name: (call, out_grad) for name, call in calls.items()}

    def turn(forward: Call, grad: Tensor) -> Call:
        def call() -> None:
            outs = [forward() for _ in range(CALLS)]
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(outs, [grad] * CALLS)

        return call

    steps = {name: turn(*pair) for name, pair in forwards.items()}
    times = {name: ms / CALLS for name, ms in take_turns(steps, rounds=args.rounds, repeats=2).items()}
    memory = {}
    for name, (call, _) in forwards.items():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        kept = call()
        memory[name] = (torch.cuda.memory_allocated() - before) / 2**30
        del kept
        print(
            f"layer, width 256, {len(case.q)} tokens: {name:24} {times[name]:.3f} ms f+b, {memory[name]:.2f} GiB kept"
        )
    for name, why in missing.items():
        print(f"layer: {name} {why}")
    return {"ms": times, "gib": memory, "missing": missing}


def _peer_layer(case: Case) -> Call:
    from generative_recommenders.ops.triton.triton_hstu_linear import triton_hstu_compute_output
    from generative_recommenders.ops.triton.triton_hstu_preprocess_and_attention import (
        triton_hstu_preprocess_and_attention,
    )

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, device="cuda") * 0.02).bfloat16().requires_grad_()

    x = torch.randn(len(case.q), 256, device="cuda").bfloat16().requires_grad_()
    norm = [torch.ones(256, device="cuda").bfloat16().requires_grad_(), weight(256)]
    norm_out = [torch.ones(256, device="cuda").bfloat16().requires_grad_(), weight(256)]
    uvqk, uvqk_bias, output = weight(256, 1024), weight(1024), weight(256, 256)

    def call() -> Tensor:
        u, attended = triton_hstu_preprocess_and_attention(
            x,
            *norm,
            1e-6,
            4,
            64,
            64,
            uvqk,
            uvqk_bias,
            2048,
            case.on_gpu,
            case.alpha,
            None,
            sort_by_length=True,
        )[:2]
        return triton_hstu_compute_output(
            attended.reshape(len(x), 256), u, x, *norm_out, output, 1e-6, 0.0, True
        )

    return call


def step(args: argparse.Namespace) -> dict[str, Any]:
    """A training step of an 8-layer HSTU of width 512, everything in it: lookup, model, loss, both updates.

    Which distinct rows a batch needs depends on its ids alone: as in training on many ranks, another thread finds it
    out a step ahead. The rows themselves are read after the update of the step before.
    """
    dim, layers, heads, num_items = 512, 8, 4, 1_000_000
    lengths = long_tail(256, 256 * 400, 4096)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    draw = torch.Generator().manual_seed(0)
    ids = (num_items ** torch.rand(tokens + 1, generator=draw)).long().clamp(max=num_items - 1)
    negatives = torch.randint(num_items, (len(lengths), 128), generator=draw)
    asked = torch.cat([ids[:-1], ids[1:], negatives.flatten()])
    spec = TableSpec(name="item", num_rows=num_items, dim=dim, optimizer=RowwiseAdagrad(), init_std=0.02)
    embedding = ShardedEmbedding([spec], device="cuda")
    encoder = HSTU(dim=dim, layers=layers, heads=heads, max_length=4096, position_bias=args.step_bias)
    model = Recommender(encoder=encoder, head=RetrievalHead()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    ahead = ThreadPoolExecutor(1)
    coming = [ahead.submit(embedding.find, "item", asked)]

    def run() -> None:
        lookup = embedding.lookup("item", coming.pop().result())
        coming.append(ahead.submit(embedding.find, "item", asked))
        item, target, negative = lookup.inverse.split([tokens, tokens, negatives.numel()])
        batch = SequenceBatch(
            offsets=offsets,
            tokens={"item_index": item, "target_index": target},
            samples={"negative_index": negative.view(negatives.shape)},
        )
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(lookup.rows, batch) / tokens
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        optimizer.step()
        embedding.update(lookup, lr=0.01, step=1)

    # Many in a row, as in training: only the first of them begins with an idle GPU.
    ms = take_turns({"step": run}, rounds=args.rounds, repeats=20)["step"]
    ahead.shutdown()
    products = 6 * tokens * layers * (dim * 4 * dim + dim * dim)
    scores = 7 * dim * layers * float(lengths.double().square().sum())
    mfu = (products + scores) / (ms / 1e3) / (PEAK_TFLOPS * 1e12)
    formula = "(6 tokens layers 5 dim^2 + 7 dim layers sum(L^2)) / time / 989.4 TFLOP/s"
    print(
        f"step, {layers} layers, width {dim}, {tokens} tokens (mean 400, max {int(lengths.max())}): {ms:.1f} ms,"
    )
    print(f"  {tokens / ms * 1e3 / 1e6:.2f} M tokens/s, MFU {mfu:.1%} = {formula}", flush=True)
    return {"ms": ms, "tokens": tokens, "mfu": mfu, "formula": formula, "bias": args.step_bias}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="checkout of generative-recommenders")
    parser.add_argument("--flex", action="store_true", help="also compile and run flex_attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-bias", action="store_true", help="position bias in the training step")
    parser.add_argument("--part", nargs="*", default=["attention", "layer", "step"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device; on a CPU see benchmarks/train_throughput.py")
    if args.peer:
        sys.path.insert(0, args.peer)
        from generative_recommenders.common import set_use_runtime_max_seq_len

        set_use_runtime_max_seq_len(True)
    parts = {"attention": attention, "layer": layer, "step": step}
    result = {name: parts[name](args) for name in args.part}
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    device = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    print(json.dumps({"benchmark": "hstu_attention", **device, **versions, **result}))


if __name__ == "__main__":
    main()
