"""What must also hold on a GPU; skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale import ShardedEmbedding, TableSpec
from freescale.comm.world.ranks import Ranks
from freescale.embedding import SGD
from freescale.kernels import (
    SequenceLayout,
    add_product,
    gate,
    hstu_attention,
    input_states,
    project_uvqk,
    sampled_softmax,
    softmax_attention,
)
from freescale.kernels.attention import reference
from freescale.kernels.rows.api import sum_by_row
from freescale.kernels.runtime import Readback
from freescale.profiling.gpu_rates import graph_cut_us
from freescale.recipe import build_run, build_source, load_config
from freescale.train.compute.seeds import seed_random_numbers
from freescale.train.log.events import Progress
from freescale.train.loop import train
from tests.small_run import SMALL, Recorder, full_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train_on(device: str, folder: Path, *overrides: str, resume_from: Path | None = None) -> dict[str, Any]:
    config = load_config(None, [*SMALL, f"run.device={device}", *overrides, f"run.out={folder}"])
    recorder = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
    run = build_run(config, build_source(config), ranks, Progress([recorder]))
    train(run, resume_from=resume_from)
    tensors = {name: np.asarray(value) for name, value in full_tensors(run).items()}
    return {
        "losses": [e["loss"] for e in recorder.of("step")],
        "evals": recorder.of("eval"),
        "tensors": tensors,
    }


@pytest.mark.parametrize("block", [32, 128, None])
def test_attention_equals_the_reference(block: int | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 17, 300, 64, 129])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    q, k, v = (
        torch.randn(total, 2, 24, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(3)
    )
    position = torch.randn(300, dtype=torch.float64, device="cuda", requires_grad=True)
    time = torch.randn(129, dtype=torch.float64, device="cuda", requires_grad=True)
    stamps = torch.randint(0, 10**6, (total,), device="cuda").cumsum(0)
    options = {"position_bias": position, "time_bias": time, "query_time": stamps + 5, "key_time": stamps}
    layout = SequenceLayout(offsets, block=block, device="cuda")
    ours = hstu_attention(q, k, v, offsets, scale=0.01, layout=layout, **options)
    truth = reference.hstu_attention(q, k, v, offsets, scale=0.01, **options)
    leaves = (q, k, v, position, time)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours.square().sum(), leaves)),
        (truth, *torch.autograd.grad(truth.square().sum(), leaves)),
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    soft = softmax_attention(q, k, v, offsets, scale=0.2, layout=layout)
    torch.testing.assert_close(soft, reference.softmax_attention(q, k, v, offsets, scale=0.2))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("half", "half_states"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("width", "num_negatives"), [(512, 128), (50, 7), (100, 300)])
def test_the_fused_loss_is_the_plain_one(
    width: int, num_negatives: int, half: bool, half_states: bool, normalize: bool
) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 17, 300, 64, 4000])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    layout = SequenceLayout(offsets, device="cuda")
    states = torch.randn(int(offsets[-1]), width, device="cuda")
    rows = torch.randn(1000, width, device="cuda")
    target = torch.randint(1000, (len(states),), device="cuda")
    negative = torch.randint(1000, (len(lengths), num_negatives), device="cuda")

    def run(dtype: torch.dtype, *, fused: bool, half: bool) -> list[torch.Tensor]:
        # States come in half precision where products are: the encoder's.
        narrow = states.bfloat16() if half_states else states
        inputs = [x.to(dtype).requires_grad_() for x in (narrow, rows)]
        if half_states and dtype == torch.float32:
            inputs[0] = narrow.requires_grad_()
        temperature = 0.05 if normalize else width**0.5
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = sampled_softmax(
                *inputs, target, negative, layout, temperature=temperature, normalize=normalize, fused=fused
            )
        return [loss, *torch.autograd.grad(loss, inputs)]

    truth = run(torch.float64, fused=False, half=False)
    fused, plain = (run(torch.float32, fused=way, half=half) for way in (True, False))
    again = run(torch.float32, fused=True, half=half)
    # The loss is one sum of 4,382 terms: which way has more luck with its rounding says nothing.
    lucky = 5e-4 if half else 1e-5
    for ours, theirs, wanted, repeated in zip(fused, plain, truth, again):
        error, other = ((x.double() - wanted).norm() / wanted.norm() for x in (ours, theirs))
        assert float(error) < max(1.5 * float(other), lucky)
        assert torch.equal(ours, repeated)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [64, 200, 512])
def test_fused_parts_of_a_layer_are_no_worse_than_the_plain_ones(width: int, half: bool) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=draw)).cuda()

    tokens = 5003
    x, attended = drawn(tokens, width, scale=1.0), drawn(tokens, width, scale=1.0)
    weights = [drawn(width, 4 * width, scale=width**-0.5), drawn(width, scale=1.0)]
    weights.append(drawn(width, width, scale=width**-0.5))
    narrow = [x.bfloat16(), attended.bfloat16()] if half else [x, attended]

    def run(states: list[torch.Tensor], dtype: torch.dtype | None, *, fused: bool) -> list[torch.Tensor]:
        inputs = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (*states, *weights)]
        x, attended, uvqk, bias, output = inputs
        with torch.autocast("cuda", torch.bfloat16, enabled=half and dtype is None):
            made = project_uvqk(x, uvqk, bias=bias, fused=fused)
            out = add_product(
                made, gate(made, attended + made.v * made.q * made.k, fused=fused), output, fused=fused
            )
        return [out.detach(), *torch.autograd.grad(out.double().sin().sum(), inputs)]

    truth = run(narrow, torch.float64, fused=False)
    fused, plain, again = (run(narrow, None, fused=way) for way in (True, False, True))
    for ours, theirs, wanted, repeated in zip(fused, plain, truth, again):
        error, other = ((t.double() - wanted).norm() / wanted.norm() for t in (ours, theirs))
        assert float(error) < max(1.3 * float(other), 1e-5)
        assert torch.equal(ours, repeated)


def test_the_gpu_follows_the_curve_of_the_cpu(tmp_path: Path) -> None:
    recipe = ("model.dtype=float64", "run.steps=60", "run.eval_every=30")
    cpu, gpu = (train_on(device, tmp_path / device, *recipe) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu["losses"], cpu["losses"], rtol=1e-9)
    for name, value in cpu["tensors"].items():
        np.testing.assert_allclose(gpu["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)
    assert [e["hr@10"] for e in gpu["evals"]] == pytest.approx([e["hr@10"] for e in cpu["evals"]])


def test_fused_adamw_follows_the_plain_one(tmp_path: Path) -> None:
    recipe = [*SMALL, "run.device=cuda", "model.dtype=float64", "run.steps=40", "run.eval_every=20"]

    def losses(*, fused: bool, resume_from: Path | None = None) -> list[float]:
        out = f"run.out={tmp_path / str(fused)}"
        config = load_config(None, [*recipe, "optim.clip_norm=0.5", "run.keep=9", out])
        recorder = Recorder()
        ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cuda"))
        run = build_run(config, build_source(config), ranks, Progress([recorder]))
        for group in run.state.optimizer.param_groups:
            assert group["fused"] is True
            group["fused"] = fused
        train(run, resume_from=resume_from)
        return [event["loss"] for event in recorder.of("step")]

    plain = losses(fused=False)
    np.testing.assert_allclose(losses(fused=True), plain, rtol=1e-9)
    # A checkpoint of the one goes on with the other, whose counts of steps are on the other side.
    path = tmp_path / "False" / "checkpoints" / "step-00000020"
    np.testing.assert_allclose(losses(fused=True, resume_from=path), plain[20:], rtol=1e-9)


def test_random_numbers_of_a_step_are_those_of_torchs_own_seed() -> None:
    for device in (torch.device("cuda"), torch.device("cuda", torch.cuda.current_device())):
        torch.manual_seed(2**63 - 25)
        wanted = torch.rand(100, device=device), torch.rand(100)
        torch.rand(7, device=device)
        seed_random_numbers(2**63 - 25, device)
        assert torch.equal(torch.rand(100, device=device), wanted[0])
        assert torch.equal(torch.rand(100), wanted[1])


def test_bfloat16_learns_nearly_as_well(tmp_path: Path) -> None:
    plain = train_on("cuda", tmp_path / "a", "run.steps=150", "run.eval_every=150")
    narrow = train_on(
        "cuda",
        tmp_path / "b",
        "run.steps=150",
        "run.eval_every=150",
        "model.dtype=bfloat16",
        "embedding.dtype=bfloat16",
    )
    assert np.mean(narrow["losses"][-20:]) == pytest.approx(np.mean(plain["losses"][-20:]), rel=0.03)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    recipe = ("model.dtype=float64", "run.eval_every=20")
    whole = train_on("cpu", tmp_path / "whole", *recipe, "run.steps=40")
    train_on("cuda", tmp_path / "parts", *recipe, "run.steps=20")
    path = tmp_path / "parts" / "checkpoints" / "step-00000020"
    rest = train_on("cpu", tmp_path / "parts", *recipe, "run.steps=40", resume_from=path)
    np.testing.assert_allclose(rest["losses"], whole["losses"][20:], rtol=1e-9)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [50, 512])
def test_the_fused_input_is_the_plain_one(width: int, half: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 17, 300, 64, 4000, *[65] * 200])
    layout = SequenceLayout(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), device="cuda")
    tokens = int(lengths.sum())
    # Some items are asked for thousands of times, most once or twice, some never.
    slots = (9000 ** torch.rand(tokens, generator=draw)).long().cuda()
    rows, position = (torch.randn(n, width, generator=draw).cuda().requires_grad_() for n in (9001, 4096))
    weight = torch.randn(tokens, width, generator=draw).cuda()

    def run(*, wide: bool = False) -> list[torch.Tensor]:
        if wide:
            positions = layout.positions
            past = rows.double()
            out = past[slots] * 22.6 + position.double()[positions]
        else:
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                out, past = input_states(rows, slots, position, layout, scale=22.6)
        outputs, given = (out, past), (weight.to(out.dtype), past.detach().cos())
        return [out.detach(), *torch.autograd.grad(outputs, (rows, position), given)]

    weight = weight.bfloat16() if half else weight
    got, again, truth = run(), run(), run(wide=True)
    assert got[0].dtype == (torch.bfloat16 if half else torch.float32)
    for n, (ours, repeated, wanted) in enumerate(zip(got, again, truth)):
        error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
        assert float(error) < (4e-3 if half and n == 0 else 1e-6)
        assert torch.equal(ours, repeated)


def test_rows_found_on_the_cpu_are_those_found_on_the_gpu() -> None:
    spec = TableSpec(name="item", num_rows=5000, dim=8, optimizer=SGD())
    embedding = ShardedEmbedding([spec], device="cuda")
    asked = torch.randint(5000, (30, 100), generator=torch.Generator().manual_seed(0))
    there, here = embedding.lookup("item", asked.cuda()), embedding.lookup("item", asked)
    for ours, wanted in ((here.rows, there.rows), (here.inverse, there.inverse), (here.unique, there.unique)):
        assert ours.is_cuda
        assert torch.equal(ours, wanted)


def test_row_sums_have_one_order() -> None:
    index = torch.randint(0, 50, (20_000,), device="cuda")
    values = torch.randn(20_000, 64, device="cuda")
    first = sum_by_row(index, values, 50)
    assert all(torch.equal(first, sum_by_row(index, values, 50)) for _ in range(5))
    exact = torch.zeros(50, 64, dtype=torch.float64).index_add_(0, index.cpu(), values.cpu().double())
    torch.testing.assert_close(first.cpu().double(), exact, rtol=1e-4, atol=1e-3)


def test_torchrun_with_nccl(tmp_path: Path) -> None:
    options = [*SMALL, "run.device=cuda", "run.steps=20", "model.dtype=bfloat16", f"run.out={tmp_path}"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--master-port",
        "29555",
    ]
    subprocess.run([*launcher, "-m", "freescale", "train", *options], check=True, timeout=110)
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 21))


def test_the_clock_of_the_gpu_reads_work_without_waiting_for_it() -> None:
    import time

    from freescale.train.accounts.cuda_clock import CudaClock

    clock = CudaClock(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    (matrix @ matrix).sum().item()
    begin = time.monotonic()
    first = clock.mark()
    for _ in range(60):
        matrix = matrix @ matrix * 1e-3
    last = clock.mark()
    # The host is through long before the device: the mark lies ahead.
    assert time.monotonic() - begin < 0.5
    assert clock.read(last) is None
    torch.cuda.synchronize()
    end = time.monotonic()
    start_s, end_s = clock.read(first), clock.read(last)
    assert start_s is not None
    assert end_s is not None
    assert begin - 1e-3 <= start_s < end_s <= end + 1e-3
    assert end - end_s < 5e-3
    assert clock.read(last) == end_s


def test_the_clock_is_right_on_a_stream_that_is_never_idle() -> None:
    import time

    from freescale.train.accounts.cuda_clock import CudaClock

    clock = CudaClock(torch.device("cuda"))
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(400):  # the host is ahead of the device from here on
        torch.mm(matrix, matrix)
    time.sleep(0.02)
    marks = []
    for _ in range(5):
        marks.append(clock.mark())
        for _ in range(100):
            torch.mm(matrix, matrix)
    last = clock.mark()
    while clock.read(last) is None:
        end = time.monotonic()
    found = clock.read(last)
    assert found is not None
    assert abs(found - end) < 3e-3


def test_every_step_on_a_gpu_has_parts_that_add_up(tmp_path: Path) -> None:
    config = load_config(None, [*SMALL, "run.device=cuda", "run.steps=12", f"run.out={tmp_path}"])
    recorder = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cuda"))
    train(build_run(config, build_source(config), ranks, Progress([recorder])), resume_from=None)
    steps = recorder.of("step")
    assert [event["step"] for event in steps] == list(range(1, 13))
    for event in steps:
        assert 0 < event["bubble"] < 1
        assert event["straggler"] == 0
        assert event["straggler"] + event["comm"] + event["host"] == pytest.approx(event["bubble"])


def test_numbers_on_their_way_to_the_host_hold_up_no_compute():
    """Copies of other streams stand before them at the same engine, as rows do that travel by way of the host."""
    bulk, beside = torch.cuda.Stream(), torch.cuda.Stream()
    many = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    there = torch.empty(many.shape, dtype=torch.uint8, pin_memory=True)
    values = torch.full((2,), 3.0, dtype=torch.float64, device="cuda")
    # Pinned memory is new once, kernels are loaded once, and both wait for the GPU.
    Readback(values, beside=beside).read()
    values.fill_(3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(bulk):
        there.copy_(many, non_blocking=True)
        copied = bulk.record_event()
    found = Readback(values, beside=beside)
    values.fill_(7.0)
    torch.cuda.current_stream().synchronize()
    assert not copied.query(), "compute has waited for the copy"
    assert found.read().tolist() == [3.0, 3.0]


def test_gaps_between_graphs_are_microseconds():
    assert 0 <= graph_cut_us(torch.device("cuda", torch.cuda.current_device())) < 100
