"""Steps recorded as CUDA graphs: the bits of the same steps computed as usual, and a host that never waits."""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.comm.world.ranks import Ranks
from freescale.kernels.attention.triton import bias_gradients
from freescale.pipeline import ReadyBatch
from freescale.recipe import build_run, build_source, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import reports_of, take_steps, timed_batches
from freescale.train.run import Run
from freescale.train.state.run_state import run_tensors
from tests.small_run import EXPERTS, SMALL, Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FEW_SIZES = (*SMALL, "data.global_batch=128", "run.device=cuda", "run.eval_every=0", "synthetic.sigma=0.5")


def make_run(out: Path, *keys: str) -> tuple[Run, Recorder]:
    config = load_config(None, [*FEW_SIZES, *keys, f"run.out={out}"])
    heard = Recorder()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device("cuda"))
    return build_run(config, build_source(config), ranks, Progress([heard])), heard


def trained(out: Path, *keys: str, records: bool = True) -> tuple[Any, list[dict[str, Any]]]:
    run, heard = make_run(out, "run.steps=50", *keys)
    if not records:
        run.train_step.padded._recorder._failures = 10**6
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    torch.cuda.synchronize()
    return {name: tensor.clone() for name, tensor in run_tensors(run).items()}, heard.of("step")


def check_bits_of_replays(folder: Path, *keys: str, replayed: float = 0.8) -> None:
    """Replayed steps leave the bits of padded ones that are computed as usual."""
    captured, steps = trained(folder / "replayed", *keys)
    usual, others = trained(folder / "usual", *keys, records=False)
    assert steps[-1]["captured"] > replayed
    assert others[-1]["captured"] == 0
    assert [each["loss"] for each in steps] == [each["loss"] for each in others]
    assert all(torch.equal(captured[name], usual[name]) for name in usual)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("optim.clip_norm=0.5",),
        ("model.dtype=bfloat16", "model.heads=2"),
        ("model.dropout=0.2",),
        ("model.kind=sasrec", "model.dtype=bfloat16", "model.dropout=0.2"),
        ("model.kind=llama", "model.dtype=bfloat16", "model.heads=2", "model.kv_heads=1"),
        ("ffn.kind=dense", "model.dtype=bfloat16"),
        ("optim.accumulate=2", "optim.clip_norm=0.5"),
        (*EXPERTS, "model.dim=16", "model.dtype=bfloat16"),
        (*EXPERTS, "model.dim=16", "model.kind=llama", "optim.accumulate=2", "moe.shared=1"),
    ],
    ids=str,
)
def test_replayed_steps_leave_the_bits_of_usual_ones(tmp_path: Path, keys: tuple[str, ...]) -> None:
    check_bits_of_replays(tmp_path, *keys)


def is_recorded(run: Run, ready: ReadyBatch) -> bool:
    """Whether nothing has to be recorded for this step, which waits for the GPU."""
    return ready.padded is None or ready.padded.key in run.train_step.padded.compute.recordings.made


@pytest.mark.parametrize("keys", [(), (*EXPERTS, "model.dim=16", "model.dtype=bfloat16")], ids=str)
def test_unwritten_memory_changes_nothing(tmp_path: Path, keys: tuple[str, ...]) -> None:
    plain, _ = trained(tmp_path / "plain", *keys)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what nobody has written with NaN
    try:
        poisoned, _ = trained(tmp_path / "poisoned", *keys)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(plain[name], poisoned[name]) for name in plain)


@pytest.mark.parametrize(
    "keys",
    [
        ("run.capture=auto",),
        ("run.capture=off",),
        ("run.capture=off", "optim.accumulate=2"),
        ("optim.accumulate=2",),
        ("synthetic.features=true",),
        ("optim.clip_norm=0.5",),
        ("model.kind=sasrec",),
        ("embedding.id_map=zero_collision", "embedding.rows=1024"),
        ("embedding.id_map=zero_collision", "embedding.rows=128", "embedding.eviction=lru"),
        ("ffn.kind=moe", "optim.clip_norm=0.5", "model.dtype=bfloat16", "model.dim=16"),
    ],
    ids=str,
)
def test_no_thread_waits_for_the_gpu_in_a_steady_step(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Where ids are learnt on the GPU, the thread ahead must know how many are new; the one that trains never waits."""
    run, _ = make_run(tmp_path, "run.steps=80", *keys)
    reports, steady = reports_of(run), 0
    waited: list[str] = []

    def heard(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA" in str(message):
            waited.append(threading.current_thread().name)

    with warnings.catch_warnings(), run.open_schedule(0) as schedule:
        warnings.simplefilter("always")
        warnings.showwarning = heard
        run.accounts.begin(1)
        try:
            for ready in timed_batches(schedule, 0):
                watched = is_recorded(run, ready) and ready.plan.step > 40
                steady += watched
                torch.cuda.set_sync_debug_mode("warn" if watched else "default")
                result = run.train_step.run(ready, schedule)
                reports.add(ready, result, seconds=run.accounts.end_step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reports.flush()
    allowed = {"ahead_0"} if run.state.learns_ids else set()
    assert set(waited) <= allowed
    assert steady > 10


WAIT = re.compile(r"cu(da)?(Device|Ctx|Stream|Event)Synchronize.*")
PROFILED = range(60, 70)
"""Steps behind the watches of a run, which use the profiler, too."""


@pytest.mark.parametrize(
    "keys",
    [
        ("run.capture=auto",),
        ("run.capture=off",),
        ("optim.accumulate=2", "optim.clip_norm=0.5"),
        ("ffn.kind=moe", "model.dtype=bfloat16", "model.dim=16"),
    ],
    ids=str,
)
def test_a_profile_has_no_wait_but_for_numbers_of_the_step_before(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Those are events, asked for behind a whole step that is queued: of loss, norm, and what is counted beside."""
    run, _ = make_run(tmp_path, "run.steps=80", *keys)
    reports = reports_of(run)
    assert reports.lag == 1
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)
    with run.open_schedule(0) as schedule:
        run.accounts.begin(1)
        for ready in timed_batches(schedule, 0):
            if ready.plan.step == PROFILED.start:
                profile.start()
            name = "step" if is_recorded(run, ready) else "recording"
            with torch.profiler.record_function(f"{name} {ready.plan.step}"):
                result = run.train_step.run(ready, schedule)
                reports.add(ready, result, seconds=run.accounts.end_step())
            if ready.plan.step == PROFILED.stop - 1:
                profile.stop()  # waits itself, behind the last step
        reports.flush()
    events = list(profile.events())
    steps = sorted((e.time_range.start, e.name) for e in events if e.name.startswith(("step ", "recording ")))
    # Up to the next one: batches are taken in between. A size that comes for the first time is recorded, which waits.
    ranges = [(a, b) for (a, name), (b, _) in pairwise(steps) if name.startswith("step ")]
    assert len(ranges) > len(PROFILED) // 2, steps
    waits = [
        e.name for e in events if WAIT.match(e.name) and any(a <= e.time_range.start < b for a, b in ranges)
    ]
    assert set(waits) <= {"cudaEventSynchronize"}, Counter(waits)
    assert len(waits) <= (2 + len(run.train_step.extensions)) * len(ranges), Counter(waits)


def test_an_evaluation_waits_for_the_gpu_only_where_it_reads_places(tmp_path: Path) -> None:
    """Of users of the batch before; their batches are kept from the second evaluation on."""
    run, _ = make_run(tmp_path, "run.steps=2", "eval.filter_seen=true")
    evaluator = replace(run.evaluation.evaluator, batch=64)
    first = evaluator.run(run.evaluation.valid)
    assert evaluator.run(run.evaluation.valid) == first
    whole = evaluator._batches.of
    # Behind the catalogue, which is made once.
    evaluator._batches.of = lambda *args: _forbidding_waits(whole(*args))  # type: ignore[method-assign]
    try:
        assert evaluator.run(run.evaluation.valid) == first
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _forbidding_waits(batches: Iterator[Any]) -> Iterator[Any]:
    torch.cuda.set_sync_debug_mode("error")
    yield from batches
    torch.cuda.set_sync_debug_mode("default")


def test_all_sizes_are_recorded_at_the_start(tmp_path: Path) -> None:
    """So that no step of a longer run is ten times as long as the others, on one rank or another."""
    run, heard = make_run(tmp_path, "run.steps=120")
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    told = run.train_step.capture_story()
    usual = run.train_step.padded.compute.recordings.usual
    assert 0 < run.train_step.timer.pads < 0.2
    assert f"pads add {run.train_step.timer.pads:.1%} to the tokens" in told
    assert sum(usual.values()) <= 6, told
    assert sum(count for reason, count in usual.items() if "first" in reason or "before" in reason) >= 1
    assert heard.of("step")[-1]["captured"] > 0.95


def test_a_run_says_once_why_it_is_not_recorded(tmp_path: Path) -> None:
    _, heard = make_run(tmp_path, "run.steps=2", "model.dtype=float64")
    assert [event["text"] for event in heard.of("notice")] == [
        "steps computed as usual, not replayed as CUDA graphs: model.dtype=float64 is computed without fused kernels"
    ]


LONG = (
    "synthetic.mean_length=150",
    "synthetic.max_length=600",
    "data.max_length=600",
    "data.global_batch=32",
    "model.dtype=bfloat16",
)


@pytest.mark.parametrize(
    ("most", "replayed"), [(160, 0.8), (86, 0.6)], ids=["all pairs are kept", "pairs of some are not"]
)
def test_batches_with_room_for_the_pairs_they_have_leave_the_bits_of_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, replayed: float
) -> None:
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", most * 2 * 128**2)
    run, _ = make_run(tmp_path / "sizes", *LONG)
    with run.open_schedule(0) as schedule:
        assert 0 < schedule._padder._sizes.blocks <= most
    check_bits_of_replays(tmp_path, *LONG, replayed=replayed)


def test_batches_with_more_pairs_than_are_kept_are_computed_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", 40 * 2 * 128**2)
    _, heard = make_run(tmp_path, "run.steps=2", *LONG)
    (told,) = [event["text"] for event in heard.of("notice")]
    assert "more pairs of tokens than gradients are kept for" in told
