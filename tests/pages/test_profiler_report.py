"""Traces of the torch profiler: the same four parts, waits inside collectives never counted as work."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.errors import DataError
from freescale.pages.profiler_report import account_traces, busy_idle, write_trace_report
from freescale.trace.profiler_trace import clock_offsets, read_profiler_trace, read_profiler_traces
from tests.ranks import run_on_ranks
from tests.trace.profiler_traces import COMPUTE_US, COPY_US, HOST_US, TRANSFER_US, write_traces

LENGTH_US = HOST_US + COPY_US + max(COMPUTE_US) + TRANSFER_US


@pytest.mark.parametrize("compress", [False, True])
def test_every_part_of_a_known_program_is_found(tmp_path, compress):
    account = account_traces(read_profiler_traces(write_traces(tmp_path, compress=compress)))
    assert account.problems == []
    for rank, parts in account.parts().items():
        truth = {
            "compute": COMPUTE_US[rank],
            "straggler": max(COMPUTE_US) - COMPUTE_US[rank],
            "comm": TRANSFER_US + COPY_US,
            "host": HOST_US,
        }
        for name, microseconds in truth.items():
            assert parts.share(name) == pytest.approx(microseconds / LENGTH_US, abs=1e-6), (rank, name)


def test_without_profiler_steps_the_whole_trace_is_one_step(tmp_path):
    account = account_traces(read_profiler_traces(write_traces(tmp_path, profiler_steps=False)))
    parts = account.parts()
    assert [len(steps) for steps in account.ranks.values()] == [1] * 4
    # The window begins with the first kernel of all: the first 5 ms of host time are not seen.
    seen = 3 * LENGTH_US - HOST_US
    assert parts[3].share("compute") == pytest.approx(3 * COMPUTE_US[3] / seen, abs=1e-6)
    assert parts[0].share("straggler") == pytest.approx(3 * 40_000 / seen, abs=1e-6)


def test_common_tools_call_the_same_wait_busy(tmp_path):
    for trace in read_profiler_traces(write_traces(tmp_path)):
        busy = busy_idle(trace)
        assert busy.idle / busy.window < 0.06
        assert busy.compute == pytest.approx(3e-6 * COMPUTE_US[trace.rank], abs=1e-6)


def test_holistic_trace_analysis_agrees_on_busy_and_idle(tmp_path):
    hta = pytest.importorskip("hta.trace_analysis")
    write_traces(tmp_path)
    theirs = hta.TraceAnalysis(
        trace_dir=str(tmp_path), include_last_profiler_step=True
    ).get_temporal_breakdown(visualize=False)
    for trace in read_profiler_traces(sorted(tmp_path.glob("*.json"))):
        mine = busy_idle(trace)
        row = theirs[theirs["rank"] == trace.rank].iloc[0]
        assert row["idle_time(us)"] == pytest.approx(1e6 * mine.idle, abs=2)
        assert row["compute_time(us)"] == pytest.approx(1e6 * mine.compute, abs=2)
        assert row["non_compute_time(us)"] == pytest.approx(1e6 * (mine.busy - mine.compute), abs=2)


def test_another_clock_is_brought_into_line_and_said(tmp_path):
    traces = read_profiler_traces(write_traces(tmp_path, skew_us=250_000))
    assert clock_offsets(traces)[1] == pytest.approx(-0.25, abs=1e-6)
    account = account_traces(traces)
    assert "The clock of rank 1 was moved by -250.00 ms" in account.problems[0]
    assert account.parts()[0].share("straggler") == pytest.approx(40_000 / LENGTH_US, abs=1e-4)


def test_traces_that_count_from_different_bases_meet(tmp_path):
    paths = write_traces(tmp_path)
    for place, path in enumerate(paths):
        content = json.loads(path.read_text())
        content["baseTimeNanoseconds"] = 1_000_000 * place
        for event in content["traceEvents"]:
            event["ts"] -= 1000 * place
        path.write_text(json.dumps(content))
    account = account_traces(read_profiler_traces(paths))
    assert account.problems == []
    assert account.parts()[0].share("straggler") == pytest.approx(40_000 / LENGTH_US, abs=1e-6)


def test_missing_ranks_are_named_and_the_rest_is_shown(tmp_path):
    account = account_traces(read_profiler_traces(write_traces(tmp_path)[:2]))
    assert "traces of 2 of 4 ranks" in account.problems[0]
    assert account.parts()[0].share("straggler") == pytest.approx(15_000 / LENGTH_US, abs=1e-6)


def test_a_file_that_was_cut_off_gives_its_whole_events(tmp_path):
    path = write_traces(tmp_path)[0]
    text = path.read_text()
    path.write_text(text[: int(0.7 * len(text))])
    trace = read_profiler_trace(path)
    assert trace.rank == 0
    assert "is cut off" in trace.problems[0]
    assert len(trace.activities) > 4


@pytest.mark.parametrize(
    "content", [b"", b"not json", b'{"traceEvents": []}', b'{"traceEvents": [1, {"ph": "X"}]}']
)
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_profiler_trace(path)


def test_two_files_of_one_rank_are_refused(tmp_path):
    path = write_traces(tmp_path)[0]
    with pytest.raises(DataError, match="same rank"):
        read_profiler_traces([path, path])


def test_the_command_prints_the_table_and_writes_the_page(tmp_path):
    paths = write_traces(tmp_path)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", "--trace", *map(str, paths), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "42.1%" in result.output  # compute of rank 0
    page = out.read_text()
    assert "any kernel" in page
    assert "The others wait most for rank 3" in page


def profiled(rank: int, folder: str) -> None:
    import time

    from torch.profiler import ProfilerActivity, profile

    matrix = torch.randn(300, 300)
    dist.all_reduce(torch.ones(10))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            (matrix @ matrix).sum()
            time.sleep(0.03 if rank == 1 else 0.0)
            dist.all_reduce(torch.ones(1000))
    profiler.export_chrome_trace(f"{folder}/rank-{rank}.json.gz")


def test_a_real_program_on_two_cpu_ranks(tmp_path):
    run_on_ranks(profiled, 2, str(tmp_path))
    paths = sorted(tmp_path.glob("*.gz"))
    parts = write_trace_report(paths, tmp_path / "page.html").parts()
    # Rank 1 sleeps five times 30 ms, which rank 0 spends in collectives (unless a busy machine holds it up, too).
    assert parts[0].straggler > 0.09
    assert parts[1].host > 0.14
