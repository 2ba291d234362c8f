"""Busy time of a real GPU: host time is what its kernels leave, and seeing them leaves nothing behind."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from freescale import trace
from freescale.balance import MeasuredStep
from freescale.comm.world.ranks import Ranks
from freescale.recipe import build_run, build_source, load_config
from freescale.trace import total
from freescale.trace.spans import Recorder
from freescale.train import AccountedStep, Progress, take_steps
from freescale.train.accounts.accounting import Accounts
from freescale.train.accounts.busy_meter import BusyMeter
from freescale.train.accounts.cuda_clock import CudaClock
from freescale.train.accounts.driver_counter import open_nvml
from freescale.train.accounts.kernel_watch import KernelWatch, in_a_file, in_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def cycles_a_ms() -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    began.record()
    torch.cuda._sleep(10_000_000)
    ended.record()
    torch.cuda.synchronize()
    return 10_000_000 / began.elapsed_time(ended)


def test_the_watch_sees_kernels_where_the_clock_puts_them() -> None:
    clock = CudaClock(torch.device("cuda"))
    cycles = cycles_a_ms()
    watch = KernelWatch(torch.device("cuda"), clock)
    for _ in range(2):  # and again, after it was taken down
        watch.start()
        time.sleep(0.01)
        before = clock.mark()
        torch.cuda._sleep(int(5 * cycles))
        after = clock.mark()
        time.sleep(0.02)
        found = watch.stop()
        low, high = clock.read(before), clock.read(after)
        assert low is not None
        assert high is not None
        ((start, end),) = found
        assert end - start == pytest.approx(0.005, rel=0.05)
        assert abs(end - high) < 2e-4
        assert low - 1e-4 < start < low + 1e-3


@pytest.mark.parametrize("idle", [0.2, 0.8])
def test_known_idle_time_is_host_time(idle: float) -> None:
    clock = CudaClock(torch.device("cuda"))
    recorder, cycles = Recorder(clock), cycles_a_ms()
    trace.record_into(recorder)
    written: list[AccountedStep] = []
    accounts = Accounts(
        ranks=Ranks(0, 1, torch.device("cuda")),
        recorder=recorder,
        write=written.append,
        busy=BusyMeter(watch=KernelWatch(torch.device("cuda"), clock), clock=clock),
    )
    accounts.begin(1)
    try:
        for step in range(1, 61):
            tokens = 900 + 37 * step % 200
            with trace.stage("train", step=step), trace.compute("forward and backward"):
                for _ in range(10):
                    until = time.perf_counter() + 2e-4 * tokens / 1000 / (1 - idle)
                    torch.cuda._sleep(int(0.2 * cycles * tokens / 1000))
                    while time.perf_counter() < until:
                        pass
            trace.describe(MeasuredStep(num_samples=1, tokens=tokens, squares=1.0, ms=0.0))
            accounts.end_step()
            accounts.add(step, {})
        accounts.pause()
    finally:
        trace.record_into(None)
    steps = [one for one in written if one.step > 20 and not one.watched]
    assert not any(one.unknown for one in steps)
    whole = total(one.ranks[0] for one in steps)
    # The host spins for its share, and does a little more between two steps; what the device does is known exactly.
    busy = sum(2e-3 * (900 + 37 * one.step % 200) / 1000 for one in steps)
    assert whole.share("host") == pytest.approx(1 - busy / whole.total, abs=0.03)
    assert whole.share("host") == pytest.approx(idle, abs=0.15)


def test_a_small_model_is_told_to_be_bound_by_its_host(tmp_path: Path) -> None:
    keys = ["run.steps=60", "run.device=cuda", "run.log_every=5", "model.dropout=0", f"run.out={tmp_path}"]
    config = load_config(None, [*keys, "data.global_batch=8", "model.dim=32"])
    seen: list[AccountedStep] = []
    run = build_run(config, build_source(config), Ranks(0, 1, torch.device("cuda", 0)), Progress())
    run.accounts.write = seen.append
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    measured = run.train_step.timer.take()
    trace.record_into(None)
    assert [one.step for one in seen] == list(range(1, 61))
    assert [one.step for one in seen if one.watched] == [*range(9, 22), *range(43, 56)]
    assert not any(one.unknown for one in seen)
    steps = [one.ranks[0] for one in seen if one.step > 20 and not one.watched]
    usual = total(steps)
    assert usual.share("host") > 0.5
    assert "Bound by its host" in run.accounts.advice
    # The cost of samples is what they cost the device, not the host.
    assert measured
    assert statistics.median(one.ms for one in measured[21:]) < 1.1 * 1000 * usual.compute / len(steps)


SEVERAL_RUNS = """
import sys, torch
from freescale.comm.world.ranks import Ranks
from freescale.prove.runs import SMALL, train_shortly
for steps in map(int, sys.argv[1:]):
    train_shortly(Ranks(rank=0, num_ranks=1, device=torch.device("cuda", 0)), (*SMALL, f"run.steps={steps}"))
"""


def test_runs_of_one_process_end_well_wherever_their_watches_would_be() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", SEVERAL_RUNS, "12", "19", "25", "12", "50", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "acc_events" not in done.stderr, "a warning of the profiler that is none of the user's"


def test_the_driver_answers_or_says_why_not() -> None:
    found = open_nvml(torch.device("cuda", 0))
    assert isinstance(found, str) or 0 <= found() <= 1


def test_a_profiler_tells_in_memory_what_it_writes_into_files() -> None:
    """Kernels and copies, with the same names and lengths; of operators nothing."""
    x = torch.randn(512, 512, device="cuda")
    host = torch.empty(512, 512, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    (x @ x).softmax(-1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = (x @ x).softmax(-1)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    for _ in range(5):
        graph.replay()
        host.copy_(y, non_blocking=True)
        x.add_(1)
    torch.cuda.synchronize()
    profiler.stop()
    told, written = in_memory(profiler), in_a_file(profiler)
    assert len(told) >= 20
    assert [(one.kind, one.name) for one in told] == [(one.kind, one.name) for one in written]
    for one, other in zip(told, written, strict=True):
        assert one.end - one.start == pytest.approx(other.end - other.start, abs=2e-9)
        assert one.start - told[0].start == pytest.approx(other.start - written[0].start, abs=2e-9)
