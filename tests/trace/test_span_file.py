"""Span files: small for any length of run, and readable whatever became of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freescale.pages.drawing.timeline import choose_ranks, choose_windows, draw_timeline, window_data
from freescale.trace.bubbles import Parts
from freescale.trace.perfetto import write_trace
from freescale.trace.span_file import (
    SpanWriter,
    common_steps,
    file_name,
    is_kept,
    read_spans,
    remove,
)
from freescale.trace.spans import Arrival, Span

STEP_S = 0.1


def write_rank(
    folder: Path, rank: int, *, num_ranks: int = 2, steps=range(1, 9), shift: float = 0.0, offset: float = 0.0
) -> None:
    """Steps of 100 ms: 60 ms of work, then a wait that ends with the step; the last rank arrives after 80 ms."""
    writer = SpanWriter(folder, rank=rank, num_ranks=num_ranks, origin=1000.0)
    for step in steps:
        start = 1000.0 + STEP_S * (step - 1) + shift - offset
        arrival = Arrival("exchange rows", step, start + 0.06, step)
        missing = ((start + 0.06, start + 0.07), (start + 0.07, start + 0.08))
        spans = [
            Span("forward and backward", "compute", "main", step, start, start + 0.06),
            Span(
                "exchange rows",
                "wait",
                "main",
                step,
                start + 0.06,
                start + 0.1,
                arrival,
                start + 0.08,
                missing,
            ),
            Span("fetch <rows>", "stage", "communication", step, start + 0.01, start + 0.05),
        ]
        writer.write(step, start, start + STEP_S, Parts(0.1, 0.06, 0.02, 0.02), spans, offset=offset)
    writer.close()


def test_what_is_written_is_read_on_one_clock(tmp_path):
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, offset=-55.5)  # this rank's clock is 55.5 s ahead of that of rank 0
    found = read_spans(tmp_path)
    assert found.problems == []
    assert common_steps(found.ranks) == list(range(1, 9))
    for one in found.ranks:
        step = one.steps[3]
        assert (step.start, step.end) == pytest.approx((0.2, 0.3))
        assert step.parts.straggler == 0.02
        work, wait, fetch = step.spans
        assert (work.name, work.kind, work.start, work.end) == ("forward and backward", "compute", 0.2, 0.26)
        assert (wait.arrival.mark, wait.last) == pytest.approx((0.26, 0.28))
        assert wait.missing == (pytest.approx((0.26, 0.27)), pytest.approx((0.27, 0.28)))
        assert (fetch.lane, fetch.arrival) == ("communication", None)


def test_long_runs_keep_few_steps_and_always_whole_blocks():
    assert all(is_kept(step) for step in range(1, 257))
    kept = [step for step in range(1, 100_001) if is_kept(step)]
    assert 1000 < len(kept) < 3000
    assert all(is_kept(first + place) for first in kept if first % 4 == 1 for place in range(4))
    # Later steps are still there.
    assert sum(step > 50_000 for step in kept) > 50


def test_a_restarted_run_shows_its_last_start(tmp_path):
    write_rank(tmp_path, 0, num_ranks=1)
    write_rank(tmp_path, 0, num_ranks=1, steps=range(5, 7))
    assert common_steps(read_spans(tmp_path).ranks) == [5, 6]


def test_cut_and_garbled_files_give_the_rest_and_say_so(tmp_path):
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1)
    path = tmp_path / "spans" / file_name(1)
    lines = path.read_text().splitlines(keepends=True)
    lines[6] = "not json\n"
    lines[7] = "[1, 2]\n"
    path.write_text("".join(lines) + '{"step":9,"sta')
    found = read_spans(tmp_path)
    assert found.problems == ["3 lines of spans/rank-00001.jsonl could not be read: cut or garbled."]
    assert common_steps(found.ranks) == list(range(1, 9))
    assert draw_timeline(found.ranks)


def test_missing_ranks_are_named(tmp_path):
    for rank in (0, 2):
        write_rank(tmp_path, rank, num_ranks=4)
    found = read_spans(tmp_path)
    assert found.problems == ["Spans of 2 of 4 ranks are missing: 1, 3."]
    assert [one.rank for one in found.ranks] == [0, 2]


def test_a_file_without_a_header_is_left_out(tmp_path):
    write_rank(tmp_path, 0)
    (tmp_path / "spans" / file_name(1)).write_text("")
    problems = read_spans(tmp_path).problems
    assert "spans/rank-00001.jsonl has no header and is left out." in problems
    assert "Spans of 1 of 2 ranks are missing: 1." in problems


def test_ranks_of_an_earlier_larger_run_are_not_shown(tmp_path):
    for rank in range(4):
        write_rank(tmp_path, rank, num_ranks=4)
    for rank in range(2):
        write_rank(tmp_path, rank, num_ranks=2)
    found = read_spans(tmp_path)
    assert [one.rank for one in found.ranks] == [0, 1]
    assert found.problems == []


def test_a_clock_that_is_off_is_told(tmp_path):
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, shift=0.3)
    (problem,) = read_spans(tmp_path).problems
    assert problem.startswith("The clock of rank 1 seems to be +300.0 ms off that of rank 0")


def test_no_spans_are_no_problem(tmp_path):
    assert read_spans(tmp_path).ranks == []
    assert read_spans(tmp_path).problems == []
    assert draw_timeline([]) == ""
    remove(tmp_path)


def test_removing_forgets_span_files_and_nothing_else(tmp_path):
    write_rank(tmp_path, 0)
    (tmp_path / "spans" / "notes.txt").write_text("mine")
    remove(tmp_path)
    assert [path.name for path in (tmp_path / "spans").iterdir()] == ["notes.txt"]


def test_the_trace_file_is_valid_and_holds_every_span(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, rank)
    content = json.loads(write_trace(tmp_path / "trace.json", read_spans(tmp_path)).read_text())
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * 8 * 4
    wait = next(event for event in slices if event["cat"] == "wait")
    assert (wait["ts"], wait["dur"]) == pytest.approx((60_000, 40_000))
    assert wait["args"]["waited_for_a_rank_us"] == pytest.approx(20_000)
    names = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"main", "communication", "steps"}


def test_the_timeline_splits_waits_and_fills_gaps(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, rank)
    data = window_data(read_spans(tmp_path).ranks, [1, 2])
    assert data["lanes"] == [["rank 0", 0], ["communication", 1], ["rank 1", 0], ["communication", 1]]
    main = [piece for piece in data["pieces"] if piece[0] == 0 and piece[3] == 1]
    kinds = {kind: length for _, kind, _, _, _, length in main}
    assert kinds == pytest.approx({0: 60_000, 1: 20_000, 2: 20_000})
    assert data["borders"] == [[1, pytest.approx(100_000)], [2, pytest.approx(200_000)]]
    html = draw_timeline(read_spans(tmp_path).ranks)
    assert "fetch <rows>" not in html  # escaped inside the script, which could otherwise be closed


def test_many_ranks_and_steps_are_thinned_evenly():
    assert choose_windows([1, 2, 3, 4, 9, 10]) == [[9, 10], [1, 2, 3, 4]]
    windows = choose_windows(range(1, 401))
    assert len(windows) == 8
    assert windows[0] == [397, 398, 399, 400]
    assert windows[-1] == [1, 2, 3, 4]
    assert choose_ranks(list(range(100)))[::31] == [0, 99]
