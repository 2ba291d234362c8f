"""Sinks of a run: metrics.jsonl through kills and resumes, the terminal in both its forms, TensorBoard."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from freescale.errors import FreeScaleError
from freescale.train.log.events import Progress
from freescale.train.log.progress import TerminalSink, print_start, print_summary
from freescale.train.log.sinks import JsonlSink, TensorBoardSink

FACTS = {
    "data": {"users": 6040, "items": 1000, "length": {"p50": 40, "max": 2314}, "file": "[bold]odd[/bold]"},
    "plan": {"ranks": 4, "balanced": True, "speeds": [1.0, 0.8]},
}
PROTOCOL = "full ranking, seen filtered, 1,000 items"
METRICS = {"hr@10": 0.1234, "hr@50": 0.3, "hr@200": 0.6, "ndcg@10": 0.07, "ndcg@50": 0.1, "mrr": 0.05}


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def train(progress: Progress, first: int, last: int, *, end: bool = True) -> None:
    """A run as the loop reports it: every step, an evaluation and a checkpoint every second one."""
    progress.start(FACTS, total_steps=last)
    for step in range(first, last + 1):
        progress.step(step, loss=10 - step, step_ms=5.0, tokens_per_s=1000.0 * step, lr=0.1)
        if step % 2 == 0:
            progress.evaluation(step, METRICS, popularity={"hr@10": 0.0312}, protocol=PROTOCOL)
            progress.checkpoint(step, f"checkpoints/step-{step}")
    if end:
        progress.end({"steps": last})
    progress.close()


def events(path: Path) -> list[dict[str, object]]:
    """What is in the file, without the clock; fails on anything that is not strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def on_terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("cut", ["", '{"event": "step", "st', '{"event": "step", "step": 6, "loss": 4'])
def test_resumed_file_reads_as_if_never_interrupted(tmp_path: Path, cut: str) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    train(Progress([JsonlSink(whole)]), 1, 9)
    train(Progress([JsonlSink(broken)]), 1, 7, end=False)
    with broken.open("a") as file:
        file.write(cut)
    train(Progress([JsonlSink(broken, resume_step=4)]), 5, 9)
    starts = [line for line in events(broken) if line["event"] == "start"]
    assert len(starts) == 1
    assert starts[0]["total_steps"] == 7
    assert events(broken)[1:] == events(whole)[1:]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"] == []


def test_resuming_a_finished_run_takes_its_end_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(Progress([JsonlSink(path)]), 1, 4)
    train(Progress([JsonlSink(path, resume_step=4)]), 5, 6)
    assert [line["event"] for line in events(path)].count("end") == 1
    assert events(path)[-1]["steps"] == 6


def test_a_run_killed_after_its_test_has_one_test_when_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tested = {"event": "eval", "split": "test", "step": 2, "trained_steps": 4, "hr@10": 0.5}
    for resume_step in (None, 4):
        sink = JsonlSink(path, resume_step=resume_step)
        for event in [{"event": "step", "step": 4}] if resume_step is None else []:
            sink.write(event)
        sink.write(tested)
        sink.close()
    assert events(path) == [{"event": "step", "step": 4}, tested]


def test_resume_at_zero_starts_anew_and_none_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"event": "start"}\n\xff\xfe garbage\n{"event": "end"}\n{"event": "st')
    JsonlSink(path).close()
    assert [line["event"] for line in events(path)] == ["start", "end"]
    sink = JsonlSink(path, resume_step=0)
    sink.write({"event": "start", "again": True})
    sink.close()
    assert events(path) == [{"event": "start", "again": True}]


def test_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}')
    sink = JsonlSink(path, resume_step=1)
    sink.write({"event": "step", "step": 2})
    sink.close()
    assert [line["step"] for line in events(path)] == [1, 2]


def test_numbers_json_does_not_have_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Progress([JsonlSink(path)]) as progress:
        progress.start({"data": {"gini": math.nan, "path": Path("a/b"), "lengths": (1, math.inf)}})
        progress.step(
            1,
            loss=math.nan,
            step_ms=np.float32(2.5),
            tokens_per_s=math.inf,
            rows=np.int64(7),
            frozen=np.bool_(True),
            scale=np.float32("nan"),
        )
    start, step = events(path)
    assert start["facts"] == {"data": {"gini": None, "path": "a/b", "lengths": [1, None]}}
    assert step == {
        "event": "step",
        "step": 1,
        "loss": None,
        "step_ms": 2.5,
        "tokens_per_s": None,
        "bubble": None,
        "straggler": None,
        "comm": None,
        "host": None,
        "imbalance": None,
        "rows": 7,
        "frozen": True,
        "scale": None,
    }


def test_killed_process_leaves_every_written_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, sys; from freescale.train.log.sinks import JsonlSink; sink = JsonlSink(sys.argv[1])\n"
        "for step in range(1, 6): sink.write({'event': 'step', 'step': step})\n"
        "os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == 9
    assert [line["step"] for line in events(path)] == [1, 2, 3, 4, 5]


def test_plain_lines_are_aligned_and_complete() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress([TerminalSink(total_steps=600, log_every=60, stream=stream, clock=clock)]) as progress:
        for step in range(1, 601):
            clock.now = step / 10
            shares = {"imbalance": 1.02, "bubble": 0.031} if step > 1 else {}
            rate = 41_230.4 if step < 300 else 7_000.0
            progress.step(step, loss=4.8123, step_ms=100.0, tokens_per_s=rate, epoch=step // 40, **shares)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step     1/600  epoch 0  loss 4.8123  41,230 tok/s"
    assert lines[2] == (
        "step   120/600  epoch 3  loss 4.8123  41,230 tok/s  balance 1.02  bubble 3.1%  eta 0:48"
    )
    assert lines[-1] == (
        "step   600/600  epoch 15  loss 4.8123   7,000 tok/s  balance 1.02  bubble 3.1%  eta 0:00"
    )
    assert len(lines) == 11


def test_plain_eval_line_names_baseline_and_protocol() -> None:
    stream = io.StringIO()
    with Progress([TerminalSink(total_steps=600, log_every=1, stream=stream)]) as progress:
        progress.evaluation(200, METRICS, popularity={"hr@10": 0.0312}, protocol=PROTOCOL)
        progress.evaluation(400, {"auc": 0.7})
    first, second = stream.getvalue().splitlines()
    assert first == (
        "eval  step 200  hr@10 0.1234  hr@50 0.3000  ndcg@10 0.0700  mrr 0.0500"
        "   (popularity hr@10 0.0312)  full ranking, seen filtered, 1,000 items"
    )
    assert second == "eval  step 400  auc 0.7000"


def test_an_eval_line_shows_short_lists_first_and_both_baselines() -> None:
    stream = io.StringIO()
    metrics = {"hr@1": 0.1, "hr@5": 0.3, "hr@20": 0.5, "ndcg@1": 0.1, "ndcg@5": 0.2, "mrr": 0.15}
    with Progress([TerminalSink(total_steps=400, log_every=10, stream=stream)]) as progress:
        progress.evaluation(
            200, metrics, popularity={"hr@1": 0.01}, repeat={"hr@1": 0.05}, protocol="how", repeat_share=0.3
        )
    assert stream.getvalue() == (
        "eval  step 200  hr@1 0.1000  hr@5 0.3000  ndcg@1 0.1000  mrr 0.1500"
        "   (popularity hr@1 0.0100, repeat last 0.0500)  how\n"
    )


def test_experts_are_in_the_step_line_and_have_one_of_their_own() -> None:
    stream = io.StringIO()
    with Progress([TerminalSink(total_steps=600, log_every=1, stream=stream)]) as progress:
        progress.step(1, loss=4.0, step_ms=1.0, tokens_per_s=10.0, expert_max=1.345)
        progress.picture(1, "experts", {"expert_max": 1.2, "expert_entropy": 0.98765, "expert_dead": 3})
        progress.picture(2, "experts", None)
    assert stream.getvalue().splitlines() == [
        "step     1/600  loss 4.0000  10 tok/s  experts 1.34",
        "experts step 1  fullest 1.20 times the mean  entropy 0.9877  3 without a token",
    ]


def test_the_line_of_an_id_map_says_how_full_it_is_and_warns() -> None:
    stream = io.StringIO()
    counts = {"asked": 1000, "hits": 900, "inserts": 90, "evictions": 4, "collisions": 7, "not_admitted": 3}
    with Progress([TerminalSink(total_steps=600, log_every=1, stream=stream)]) as progress:
        progress.picture(200, "ids", {"slots": 12_000, "occupancy": 0.5, **counts, "warning": None})
        progress.picture(
            400, "ids", {"slots": 12_000, "occupancy": 0.95, **counts, "warning": "it runs full"}
        )
        progress.picture(600, "ids", None)
    first, second = stream.getvalue().splitlines()
    assert first == (
        "ids   step 200  50.0% of 12,000 slots taken  90.0% hits  90 new  4 evicted  10 shared a row"
    )
    assert second.endswith("   warning: it runs full")


def test_id_maps_of_other_tables_have_lines_and_warnings_with_their_names() -> None:
    stream = io.StringIO()
    counts = {"asked": 1000, "hits": 900, "inserts": 90, "evictions": 4, "collisions": 7, "not_admitted": 3}
    with Progress([TerminalSink(total_steps=600, log_every=1, stream=stream)]) as progress:
        progress.picture(
            200, "ids_user", {"slots": 500, "occupancy": 0.95, **counts, "warning": "it runs full"}
        )
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("ids   step 200  user  95.0% of 500 slots taken  90.0% hits")
    assert line.endswith("   warning: user: it runs full")


def test_nan_loss_is_shown_and_colour_forced_on_a_file_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Progress([TerminalSink(total_steps=10, log_every=1, stream=stream)]) as progress:
        progress.step(1, loss=math.nan, step_ms=None, tokens_per_s=None)
    assert stream.getvalue() == "step     1/10  loss nan\n"


def test_resumed_run_shows_its_first_step_although_it_is_no_multiple() -> None:
    stream = io.StringIO()
    with Progress([TerminalSink(total_steps=600, log_every=100, stream=stream)]) as progress:
        for step in range(121, 130):
            progress.step(step, loss=1.0, step_ms=1.0, tokens_per_s=1.0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["121/600"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_terminal_keeps_one_live_line_with_evaluations_above(width: int) -> None:
    console, clock = on_terminal(width), Clock()
    sink = TerminalSink(total_steps=600, log_every=100, console=console, clock=clock)
    with Progress([sink]) as progress:
        for step in range(1, 601):
            clock.now = step / 10
            progress.step(
                step,
                loss=4.8123,
                step_ms=100.0,
                tokens_per_s=41_230.0,
                epoch=3,
                imbalance=1.02,
                bubble=0.031,
            )
            if step == 200:
                progress.evaluation(step, METRICS, popularity={"hr@10": 0.0312}, protocol=PROTOCOL)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(console))
    permanent = [line.rpartition("\r")[2] for line in text.split("\n") if line]
    assert permanent[0].startswith("eval  step 200  hr@10 0.1234")
    assert PROTOCOL in "\n".join(permanent)
    assert "600/600" in permanent[-1]
    assert "loss 4.8123" in permanent[-1]
    assert "eta 0:00" in permanent[-1]
    assert ("balance 1.02" in permanent[-1]) == (width == 120)
    assert all(
        len(frame) <= width for line in text.split("\n") for frame in line.split("\r") if "/600" in frame
    )
    assert shown(console).endswith("\x1b[?25h"), "the cursor comes back"


def test_terminal_is_not_redrawn_for_every_fast_step() -> None:
    console, clock = on_terminal(), Clock()
    sink = TerminalSink(total_steps=10_000, log_every=1, console=console, clock=clock)
    for step in range(1, 1001):
        clock.now = step / 1000
        sink.write({"event": "step", "step": step, "loss": 1.0})
    sink.close()
    assert shown(console).count("/10000") <= 15


def test_start_and_end_print_tables_through_the_sink() -> None:
    stream = io.StringIO()
    with Progress([TerminalSink(total_steps=10, log_every=1, stream=stream)]) as progress:
        progress.start(FACTS)
        progress.end({"steps": 10, "seconds": 75.0, "report": "runs/a/report.html"})
    text = stream.getvalue()
    assert "users     6,040" in text
    assert "Training finished" in text
    assert "1 min 15 s" in text


@pytest.mark.parametrize("console_of", [on_terminal, lambda width: Console(file=io.StringIO(), width=width)])
def test_start_tables_fit_eighty_columns(console_of) -> None:  # type: ignore[no-untyped-def]
    console = console_of(80)
    print_start(console, {**FACTS, "model": {"description": "long words " * 20}})
    lines = shown(console).splitlines()
    assert lines[0] == "data   users        6,040"
    assert "       length       p50 40  max 2,314" in lines
    assert "       file         [bold]odd[/bold]" in lines
    assert "       balanced     yes" in lines
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_summary_says_time_speed_quality_and_where() -> None:
    console = Console(file=io.StringIO(), width=80)
    summary = {
        "steps": 600,
        "seconds": 3725.0,
        "samples_per_s": 1234.4,
        "tokens_per_s": 41_230.0,
        "best_metric": "hr@10",
        "best_value": 0.1234,
        "best_step": 400,
        "popularity": 0.0312,
        "checkpoint": "runs/a/checkpoints/step-400",
        "report": "runs/" + "deep/" * 20 + "report.html",
    }
    print_summary(console, summary)
    lines = shown(console).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "1 h 2 min",
        "600",
        "1,234 samples/s   41,230 tokens/s",
        "hr@10 0.1234 at step 400, 4.0x popularity (0.0312)",
        "runs/a/checkpoints/step-400",
    ):
        assert part in text
    print_summary(console, {})
    print_summary(console, {"status": "interrupted", "best_value": 0.1, "popularity": 0.0})
    assert "Training interrupted" in shown(console)


def test_every_sink_is_closed_even_if_one_fails() -> None:
    closed = []

    class Sink:
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, event: dict[str, object]) -> None:
            pass

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "bad":
                raise OSError("disk full")

    progress = Progress([Sink("first"), Sink("bad"), Sink("last")])
    with pytest.raises(OSError, match="disk full"):
        progress.close()
    assert sorted(closed) == ["bad", "first", "last"]
    progress.close()
    assert len(closed) == 3


def test_tensorboard_has_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(Progress([TensorBoardSink(tmp_path)]), 1, 4)
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert {"train/loss", "train/lr", "eval/hr@10", "eval/popularity_hr@10"} <= tags
    assert not tags & {"train/time", "train/step", "train/bubble"}
    assert [(point.step, point.value) for point in accumulator.Scalars("train/loss")][-1] == (4, 6.0)


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(FreeScaleError) as caught:
        TensorBoardSink(tmp_path)
    assert caught.value.next_step == "pip install '.[tensorboard]' in the clone, or pip install tensorboard"


def test_import_brings_no_torch() -> None:
    code = (
        "import sys, freescale.train.log.progress, freescale.pages.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_terminal_goes_on_to_the_new_last_step_where_the_data_grow() -> None:
    stream = io.StringIO()
    progress = Progress([TerminalSink(total_steps=2, log_every=10, stream=stream)])
    for step in (1, 2):
        progress._write({"event": "step", "step": step, "loss": 1.0})
    progress.grown(2, total_steps=30)
    for step in range(3, 31):
        progress._write({"event": "step", "step": step, "loss": 1.0})
    steps = re.findall(r"step\s+(\d+)/(\d+)", stream.getvalue())
    assert steps == [("1", "2"), ("2", "2"), ("10", "30"), ("20", "30"), ("30", "30")]
