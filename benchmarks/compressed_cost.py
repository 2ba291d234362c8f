"""What compressing long histories saves: requests from token caches and training in segments, beside the full ones.

    PYTHONPATH=. python benchmarks/compressed_cost.py [--quick] [--rounds 7] [--users 256]

Checks first that a cached request gives the states of the masked pass, and the masked pass those of the reference.
Then all contenders take turns; the table has medians and peak memory.

A request is everything from item vectors and a store of caches to the states of the recent events, as a service would
ask: by a recorded graph, by the same kernels started one by one, and from separate caches that are put together first.
The full one runs the same encoder over all n events. A graph keeps its memory, so the line without one has the memory
of a request.

Of training, two cases stand side by side, each with time and memory: attention alone, its work lists made before; and
the step of the whole encoder, forward and backward, in which both contenders make layouts and lists anew as they do for
every batch. The claim about five segments is on the time of attention alone: projections and gates cost the same
however events are cut, so the step of the encoder cannot fall below what is left of it without the attention that was
saved, printed as its floor. Memory of a step does not shrink: the kernels keep no number a pair, only numbers a token.

`--quick` runs small sizes on the CPU and gives CPU time; its cases are too small to say anything about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.data.batches.segment_rule import SegmentRule, Segments
from freescale.data.batches.segments import insert_summaries
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention
from freescale.kernels.attention import reference
from freescale.model import RequestGraph
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.compression.segmented import SegmentedEncoder
from freescale.model.recommender import make_encoder

Call = Callable[[], Any]
RECENT, SUMMARIES = 50, 4


class Setting:
    """Sizes of the model and where it runs."""

    def __init__(self, *, quick: bool) -> None:
        cuda = torch.cuda.is_available() and not quick
        self.device = torch.device("cuda" if cuda else "cpu")
        self.dim, self.layers, self.heads = (256, 8, 4) if cuda else (32, 2, 2)
        self.lengths = (1280, 4096) if cuda else (320, 640)
        self.train_length, self.train_users = (4096, 64) if cuda else (640, 1)
        self.in_a_row = 4 if cuda else 1

    def encoder(self, n: int, rule: SegmentRule | None, *, bias: bool = True) -> torch.nn.Module:
        """HSTU over n events, in segments or whole; the same weights every time."""
        torch.manual_seed(0)
        segments = None if rule is None else {**rule.__dict__}
        made = make_encoder(
            "hstu",
            segments=segments,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            max_length=n,
            dropout=0.0,
            position_bias=bias,
            time_bias=False,
        )
        return made.to(self.device)

    def events(self, users: int, n: int) -> tuple[Tensor, SequenceBatch]:
        """Item vectors of n events of every user."""
        draw = torch.Generator().manual_seed(1)
        vectors = torch.randn(users * n, self.dim, generator=draw) * 0.2
        return vectors.to(self.device), SequenceBatch(offsets=torch.arange(users + 1) * n)

    def half(self) -> Any:
        """Products in bfloat16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


def check(setting: Setting) -> dict[str, float]:
    """Largest relative errors in float32: cached against masked states, masked kernel against the reference."""
    rule = SegmentRule(recent=20, length=45, summaries=SUMMARIES)
    encoder = setting.encoder(200, rule).eval()
    assert isinstance(encoder, SegmentedEncoder)
    for name, param in encoder.named_parameters():
        if "position" in name or "summaries" in name:
            param.data.normal_(std=0.3)
    vectors, batch = setting.events(3, 173)
    with torch.no_grad():
        masked = encoder(vectors, batch, SequenceLayout(batch.offsets, device=setting.device))
        cached = Compressor(encoder, model="check").last_states(vectors, batch)
    last = masked[(batch.offsets[1:] - 1).to(masked.device)]
    served = float((last - cached).abs().max() / last.abs().max())
    cut = insert_summaries(batch, rule.cut(batch.lengths.numpy()), summaries=SUMMARIES, device=setting.device)
    mask = cut.mask
    draw = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(cut.batch.num_tokens, 2, 32, generator=draw).to(setting.device).requires_grad_()
        for _ in range(3)
    )
    table = torch.randn(300, generator=draw).to(setting.device).requires_grad_()
    options: dict[str, Any] = {"scale": 0.01, "mask": mask, "position_bias": table}
    ours = hstu_attention(q, k, v, cut.batch.offsets, **options)
    truth = reference.hstu_attention(q, k, v, cut.batch.offsets, **options)
    pairs = [(ours, truth)]
    pairs += zip(
        torch.autograd.grad(ours.square().sum(), [q, k, v, table]),
        torch.autograd.grad(truth.square().sum(), [q, k, v, table]),
    )
    kernel = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    if served > 1e-5 or kernel > 1e-4:
        sys.exit(f"wrong: cached against masked {served:.1e}, kernel against reference {kernel:.1e}")
    return {"cached against masked": served, "kernel against reference": kernel}


def take_turns(calls: dict[str, Call], *, rounds: int, cuda: bool, in_a_row: int) -> dict[str, float]:
    """Median milliseconds of each call: of the clock on a GPU, of the processor on a CPU.

    One at a time is how long somebody waits for it. Several in a row is what they cost where the host runs ahead of the
    GPU, as it does in training.
    """
    clock = time.perf_counter if cuda else time.process_time
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(2):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            if cuda:
                torch.cuda.synchronize()
            start = clock()
            for _ in range(in_a_row):
                call()
            if cuda:
                torch.cuda.synchronize()
            times[name].append(1000 * (clock() - start) / in_a_row)
    return {name: statistics.median(values) for name, values in times.items()}


def peak(call: Call, *, cuda: bool) -> float | None:
    """MiB that a call needs beside what is there."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def request(setting: Setting, n: int, *, users: int, rounds: int) -> dict[str, Any]:
    """A batch of requests after histories of n - 50 events."""
    rule = SegmentRule(recent=RECENT, length=-(-(n - RECENT) // 5), summaries=SUMMARIES)
    compressed, full = setting.encoder(n, rule).eval(), setting.encoder(n, None).eval()
    assert isinstance(compressed, SegmentedEncoder)
    kept = torch.bfloat16 if setting.device.type == "cuda" else torch.float32
    server = Compressor(compressed, model="benchmark", dtype=kept)
    vectors, batch = setting.events(users, n)
    wide = vectors.view(users, n, -1)
    history = wide[:, :-RECENT].flatten(0, 1)
    recent = wide[:, -RECENT:].flatten(0, 1).contiguous()
    old = SequenceBatch(offsets=torch.arange(users + 1) * (n - RECENT))
    with setting.half():
        store = server.compress(history, old)
    assert isinstance(store, PackedCaches)
    separate = list(store)
    asked = SequenceBatch(offsets=torch.arange(users + 1) * RECENT)
    everyone = np.arange(users)

    @torch.no_grad()
    def run_full() -> Tensor:
        with setting.half():
            return full(vectors, batch, SequenceLayout(batch.offsets, device=setting.device))

    def run_cached() -> Tensor:
        with setting.half():
            return server.states(recent, asked, store.select(everyone))

    def run_separate() -> Tensor:
        with setting.half():
            return server.states(recent, asked, separate)

    def run_compress() -> Any:
        with setting.half():
            return server.compress(history, old)

    calls: dict[str, Call] = {"full forward": run_full}
    if setting.device.type == "cuda":
        with setting.half():
            graph = RequestGraph(server, store, users=users, recent=RECENT, dim=setting.dim)
        calls["cached request"] = lambda: graph.states(recent, asked, everyone)
        difference = float((calls["cached request"]() - run_cached()).abs().max() / run_cached().abs().max())
        if difference > 2e-2:  # bfloat16; what is wrong is wrong by far more
            sys.exit(f"wrong: the recorded request differs from the plain one by {difference:.1e}")
        calls["without graph"] = run_cached
    else:
        calls["cached request"] = run_cached
    calls |= {"separate caches": run_separate, "compress, once": run_compress}
    found = report(setting, f"n = {n}, {users} users", calls, "full forward", rounds=rounds)
    kept = separate[0].nbytes if separate[0] is not None else 0
    print(f"  cached request without the wait for its end: {host_only(calls['cached request']):.3f} ms")
    return found | {"cache bytes a user": kept, "n": n}


def host_only(call: Call) -> float:
    """Best milliseconds of eleven until a call comes back, the device not waited for."""
    times = []
    for _ in range(11):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def training(setting: Setting, *, users: int, bias: bool, rounds: int) -> dict[str, Any]:
    """Forward and backward of the encoder over n events: all pairs, or five equal parts with summaries between."""
    n = setting.train_length
    part = n // 5
    rule = SegmentRule(recent=n - 4 * part, length=part, summaries=SUMMARIES)
    vectors, batch = setting.events(users, n)
    vectors.requires_grad_()

    def step(encoder: torch.nn.Module) -> Call:
        def call() -> None:
            # Made for every batch, as a training step does.
            layout = SequenceLayout(batch.offsets, device=setting.device)
            with setting.half():
                states = encoder(vectors, batch, layout)
            states.square().sum().backward()
            encoder.zero_grad(set_to_none=True)
            vectors.grad = None

        return call

    calls = {
        "full attention": step(setting.encoder(n, None, bias=bias)),
        "5 segments": step(setting.encoder(n, rule, bias=bias)),
    }
    name = f"training step, n = {n}, {users} users, {'position bias' if bias else 'no bias'}"
    share = float(rule.pairs(np.array([n]))[0] / (n * (n + 1) // 2))
    found = report(setting, name, calls, "full attention", rounds=rounds, in_a_row=setting.in_a_row)
    return found | {"share of pairs": share}


def attention_alone(setting: Setting, *, users: int, bias: bool, rounds: int) -> dict[str, Any]:
    """Forward and backward of one attention, with and without the mask of five equal segments."""
    n, width = setting.train_length, setting.dim // setting.heads
    part = n // 5
    _, batch = setting.events(users, n)
    sizes = np.full(4 * users, part)
    cut = insert_summaries(
        batch,
        Segments(np.repeat(np.arange(users), 4), sizes),
        summaries=SUMMARIES,
        device=setting.device,
    )
    mask = cut.mask
    dtype = torch.bfloat16 if setting.device.type == "cuda" else torch.float32
    table = torch.zeros(2 * n, device=setting.device, requires_grad=True) if bias else None

    def turn(offsets: Tensor, mask: AttentionMask | None) -> Call:
        shape = (int(offsets[-1]), setting.heads, width)
        q, k, v = (torch.randn(shape, device=setting.device).to(dtype).requires_grad_() for _ in range(3))
        inputs = [q, k, v] if table is None else [q, k, v, table]
        grad = torch.randn(shape, device=setting.device).to(dtype)
        layout = SequenceLayout(offsets, device=setting.device)

        def call() -> None:
            out = hstu_attention(q, k, v, offsets, scale=1 / n, position_bias=table, mask=mask, layout=layout)
            torch.autograd.grad(out, inputs, grad)

        return call

    calls = {"full attention": turn(batch.offsets, None), "5 segments": turn(cut.batch.offsets, mask)}
    name = f"attention alone, n = {n}, {users} users, {'position bias' if bias else 'no bias'}"
    return report(setting, name, calls, "full attention", rounds=rounds, in_a_row=setting.in_a_row)


def report(
    setting: Setting, name: str, calls: dict[str, Call], base: str, *, rounds: int, in_a_row: int = 1
) -> dict[str, Any]:
    cuda = setting.device.type == "cuda"
    times = take_turns(calls, rounds=rounds, cuda=cuda, in_a_row=in_a_row)
    memory = {call: peak(run, cuda=cuda) for call, run in calls.items()}
    print(f"\n{name}")
    for call, ms in times.items():
        used = memory[call]
        more = "" if used is None else f"  {used:10.1f} MiB {100 * used / (memory[base] or 1):6.1f} %"
        print(f"  {call:16} {ms:10.3f} ms {100 * ms / times[base]:6.1f} %{more}")
    return {"case": name, "ms": times, "MiB": memory}


def claims(requests: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """Each claim beside what was found."""
    print("\nclaims")
    for found in requests:
        share = 100 * found["ms"]["cached request"] / found["ms"]["full forward"]
        print(f"  cached request, {found['case']}: {share:.1f} % of the full forward, claimed at most 10 %")
        if (used := found["MiB"].get("without graph")) is not None:
            share = 100 * used / found["MiB"]["full forward"]
            print(f"  its memory: {share:.1f} % of the full forward's, claimed at most 10 %")
    for found in steps:
        share = 100 * found["ms"]["5 segments"] / found["ms"]["full attention"]
        alone = found["case"].startswith("attention alone")
        print(f"  {found['case']}: {share:.1f} %" + (", claimed at most 45 %" if alone else ", no claim"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--users", type=int, default=None, help="users asked for at once")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    setting = Setting(quick=args.quick)
    if setting.device.type == "cpu":
        torch.set_num_threads(1)  # waiting threads would count as CPU time
    users = args.users or (256 if setting.device.type == "cuda" else 2)
    errors = check(setting)
    print("largest relative errors:", ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    rounds = args.rounds
    requests = [request(setting, n, users=users, rounds=rounds) for n in setting.lengths]
    batch = setting.train_users
    steps = []
    for bias in (False, True):
        alone = attention_alone(setting, users=batch, bias=bias, rounds=rounds)
        whole = training(setting, users=batch, bias=bias, rounds=rounds)
        saved = setting.layers * (alone["ms"]["full attention"] - alone["ms"]["5 segments"])
        whole["floor %"] = 100 * (1 - saved / whole["ms"]["full attention"])
        print(f"  floor of the step, all that is not attention unchanged: {whole['floor %']:.1f} %")
        steps += [alone, whole]
    claims(requests, steps)
    where = torch.cuda.get_device_name() if setting.device.type == "cuda" else "CPU"
    facts = {"device": where, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    model = {"dim": setting.dim, "layers": setting.layers, "heads": setting.heads, "recent": RECENT}
    print(json.dumps({**facts, **model, "errors": errors, "requests": requests, "training": steps}))


if __name__ == "__main__":
    main()
