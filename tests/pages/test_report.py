"""The report of a run: complete, incomplete, hostile, and in a real browser."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from freescale import units
from freescale.errors import FreeScaleError
from freescale.pages.drawing.charts import MAX_POINTS, Chart, Series, draw
from freescale.pages.drawing.smoothing import is_noisy, moving_average, moving_median
from freescale.pages.report import render_report, write_report
from freescale.trace.metrics_log import read_metrics
from freescale.trace.span_file import read_spans
from tests.trace.test_span_file import write_rank

HOSTILE = "<script>alert('x')</script>\"&"
PROTOCOL = "full ranking, seen filtered, 1,000 items"
CONFIG = "run:\n  out: runs/demo\nmodel:\n  kind: hstu\n"
VOID = {"meta", "path", "br"}


def run_events(num_steps: int = 120, *, bubbles: bool = True) -> list[dict[str, object]]:
    """A plausible run: slow first step, falling noisy loss, rising metrics."""
    draw_from = random.Random(0)
    events: list[dict[str, object]] = [
        {"event": "start", "total_steps": num_steps, "facts": {"data": {"users": 6040, "items": 1000}}}
    ]
    for step in range(1, num_steps + 1):
        shares = {"straggler": 0.01, "comm": 0.02, "host": 0.005, "bubble": 0.035, "imbalance": 1.004}
        events.append(
            {
                "event": "step",
                "step": step,
                "loss": 4 + 3 * math.exp(-step / 40) + draw_from.gauss(0, 0.1),
                "step_ms": 9000.0 if step == 1 else 50 + draw_from.random(),
                "tokens_per_s": 500.0 if step == 1 else 41_230.0,
                "lr": 0.001,
                **(shares if bubbles else dict.fromkeys(shares)),
            }
        )
        if step % 40 == 0:
            metrics = {
                "hr@10": 0.001 * step,
                "hr@50": 0.003 * step,
                "ndcg@10": 0.0005 * step,
                "mrr": 0.0004 * step,
            }
            events.append(
                {"event": "eval", "step": step, **metrics, "popularity_hr@10": 0.03, "protocol": PROTOCOL}
            )
    return [*events, {"event": "end", "steps": num_steps, "seconds": 75.0}]


def write_run(folder: Path, events: list[dict[str, object]], *, config: str | None = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


class Page(HTMLParser):
    """Text, tags and balance of a page, as a browser that forgives nothing would see it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def titles(self) -> list[str]:
        charts = (dict(attrs) for tag, attrs in self.tags if tag == "div" and attrs.get("class") == "plot")
        return [str(attrs["aria-label"]).partition(",")[0] for attrs in charts]


def report_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_complete_run_shows_headline_curves_facts_and_configuration(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", run_events()))
    for words in (
        "demo finished",
        "Best HR@10 0.1200 4.0x popularity (0.0300), step 120",
        "Tokens per second 41,230 median",
        "Bubble 3.5%",
        "Steps 120 of 120",
        "Wall time 1 min 15 s",
        "users 6,040",
        "kind: hstu",
        PROTOCOL,
        "The highest point, 9,000.0 ms at step 1, lies above the scale.",
    ):
        assert words in page.text
    assert page.titles() == [
        "Share of the step in which nothing was computed",
        "Loss",
        "Hit rate",
        "NDCG",
        "Mean reciprocal rank",
        "Tokens per second",
        "Step time",
        "Balance",
        "Learning rate",
    ]
    assert "What is missing" not in page.text


def test_an_id_map_is_shown_as_last_seen_with_the_counts_of_the_whole_run(tmp_path: Path) -> None:
    counts = {"asked": 500, "hits": 450, "inserts": 40, "evictions": 5, "collisions": 10, "not_admitted": 0}
    pictures: list[dict[str, object]] = [
        {
            "event": "ids",
            "step": step,
            "slots": 4000,
            "occupancy": full,
            **counts,
            "probe_histogram": {"2-3": 77},
        }
        for step, full in ((40, 0.25), (80, 0.5))
    ]
    page = report_of(write_run(tmp_path / "demo", [*run_events()[:-1], *pictures, run_events()[-1]]))
    for words in (
        "Zero-collision ids at step 80",
        "slots 4,000",
        "taken 50.0%",
        "lost theirs 10",
        "slots from home 2-3 77 ids",
    ):
        assert words in page.text
    others = [{**picture, "event": "ids_artist", "slots": 70} for picture in pictures]
    page = report_of(write_run(tmp_path / "tables", [*run_events()[:-1], *others, run_events()[-1]]))
    assert "Zero-collision ids artist, at step 80 slots 70" in page.text
    assert "Ids at step" not in report_of(write_run(tmp_path / "other", run_events())).text


def test_experts_are_shown_layer_by_layer_with_the_worst_of_the_run(tmp_path: Path) -> None:
    pictures: list[dict[str, object]] = [
        {
            "event": "experts",
            "step": step,
            "expert_max": 1.25,
            "expert_entropy": 0.9,
            "expert_dead": dead,
            "tokens_per_expert": {"encoder.layers.0.ffn": [30, 10, 0, 0]},
        }
        for step, dead in ((40, 3), (80, 2))
    ]
    page = report_of(write_run(tmp_path / "demo", [*run_events()[:-1], *pictures, run_events()[-1]]))
    for words in (
        "Experts up to step 80",
        "experts without a token 2",
        "at most over the run 3",
        "tokens, encoder.layers.0.ffn expert 0 75.0 %",
    ):
        assert words in page.text
    assert "Experts up to" not in report_of(write_run(tmp_path / "other", run_events())).text


def test_report_needs_nothing_but_itself(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "demo", run_events())).read_text()
    page = Page(html)
    assert not re.search(r"https?:|//cdn|@import|url\(", html)
    assert not any(name in attrs for _, attrs in page.tags for name in ("src", "href"))
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    assert [path.name for path in sorted((tmp_path / "demo").iterdir())] == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
    ]


def test_unmeasured_bubbles_leave_no_empty_chart(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", run_events(bubbles=False)))
    assert "Bubble" not in page.text
    assert "Balance" not in page.titles()


def test_test_targets_of_another_protocol_say_so(tmp_path: Path) -> None:
    whole, first = f"{PROTOCOL}, 6,040 users", f"{PROTOCOL}, first 100 of 6,040 users"
    *events, end = run_events()
    for event in events:
        if event["event"] == "eval":
            event["protocol"] = first
    for name, protocol in {"same": first, "other": whole}.items():
        test = {"event": "eval", "split": "test", "step": 80, "hr@10": 0.1, "protocol": protocol}
        page = report_of(write_run(tmp_path / name, [*events, test, end]))
        assert f"Evaluation: {first}" in page.text
        assert (f"Test: {whole}" in page.text) == (name == "other")


def test_popularity_is_dashed_and_explained(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", run_events()))
    dashed = [attrs for tag, attrs in page.tags if tag == "path" and "dashed" in str(attrs.get("class"))]
    assert len(dashed) == 1
    assert "Dashed: always recommending the most popular items." in page.text


def test_every_word_from_data_is_escaped(tmp_path: Path) -> None:
    events = run_events(5)
    events[0]["facts"] = {HOSTILE: {HOSTILE: HOSTILE}}
    events[1][HOSTILE] = 3.0
    events.append({"event": "eval", "step": 5, HOSTILE: 0.5, "hr@10": 0.1, "protocol": HOSTILE})
    events.append({"event": "end", "status": HOSTILE, "seconds": 1})
    folder = write_run(tmp_path / "<script>alert(1)<", events, config=f"run: {HOSTILE}\n")
    html = write_report(folder).read_text()
    page = Page(html)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert "<script>alert" not in html
    assert "alert" not in "".join(re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL))
    # Name, title, protocol, status, facts (3), configuration, a step curve and an eval curve.
    assert page.text.count("<script>alert") >= 10


def test_truncated_and_garbled_lines_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", run_events(60)[:50])
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[10] = "not json\n"
    lines[11] = "[1, 2]\n"
    path.write_bytes("".join(lines).encode() + b'{"event": "step", "step": 61, "lo')
    page = report_of(folder)
    assert "Line 51, the last one, is cut" in page.text
    assert "2 lines of metrics.jsonl could not be read and are left out: 11, 12." in page.text
    assert "it is still going or was stopped after step 48" in page.text
    assert "not finished" in page.text
    assert "Loss" in page.titles()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "There are no training steps yet."),
        (
            b'{"event": "step", "step": 1, "loss": null}\n',
            "The loss is missing or not finite in 1 of 1 steps",
        ),
        (b'{"event": "step", "step": "x"}\n{"event": "eval"}\n{"event": "new"}\n', "no training steps"),
        (b'{"event": "step", "step": 1, "loss": NaN, "step_ms": 1e999, "x": {}}\n', "first at step 1"),
        (b'{"event": "start", "facts": [1], "gpu": "none"}\n', "There was no evaluation yet"),
    ],
)
def test_any_content_gives_a_page_that_says_what_is_missing(
    tmp_path: Path, content: bytes, said: str
) -> None:
    folder = write_run(tmp_path / "demo", [])
    (folder / "metrics.jsonl").write_bytes(content)
    page = report_of(folder)
    assert said in page.text
    assert "Final loss -" in page.text


def test_missing_files_are_named(tmp_path: Path) -> None:
    no_config = report_of(write_run(tmp_path / "a", run_events(5), config=None))
    assert "config.yaml is missing" in no_config.text
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    assert "metrics.jsonl is missing" in report_of(folder).text


def test_no_run_is_an_error_that_names_the_runs_there_are(tmp_path: Path) -> None:
    write_run(tmp_path / "good", run_events(2))
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        with pytest.raises(FreeScaleError) as caught:
            write_report(tmp_path / name)
        assert caught.value.next_step == f"freescale report {tmp_path / 'good'}"
    with pytest.raises(FreeScaleError) as caught:
        write_report(tmp_path / "nowhere" / "run")
    assert "freescale train" in str(caught.value.next_step)


def test_repeated_steps_keep_the_later_line(tmp_path: Path) -> None:
    steps = [{"event": "step", "step": step, "loss": loss} for step, loss in ((1, 1), (2, 2), (3, 9), (2, 5))]
    log = read_metrics(write_run(tmp_path, steps) / "metrics.jsonl")
    assert [event["loss"] for event in log.steps] == [1, 5, 9]


def test_best_is_the_first_highest_and_popularity_the_last_known(tmp_path: Path) -> None:
    values = ((10, 0.1, 0.01), (20, 0.3, 0.02), (30, 0.3, None))
    evals = [{"event": "eval", "step": s, "hr@10": v, "popularity_hr@10": p} for s, v, p in values]
    log = read_metrics(write_run(tmp_path, evals) / "metrics.jsonl")
    assert log.best("hr@10") == (0.3, 20)
    assert log.popularity("hr@10") == 0.02
    assert log.best("mrr") is None
    assert log.last_step == 30


def test_long_runs_stay_small_and_keep_their_spike() -> None:
    losses = [1.0] * 100_000
    losses[54_321] = 7.0
    html = draw(Chart("loss", range(100_000), [Series("loss", losses)]))
    assert len(html) < 60_000
    assert "step 54,321" in html
    assert html.count("L") <= MAX_POINTS + 2


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0], [-3.0, -3.0], [1e9, 1e9 + 1e-6], [1e-12, 2e-12], [-1e99, 1e99], [None, 5.0, None]],
    ids=str,
)
def test_any_values_can_be_drawn(values: list[float | None]) -> None:
    for from_zero in (False, True):
        html = draw(Chart("c", range(len(values)), [Series("s", values)], from_zero=from_zero))
        Page(html)
        assert not re.search(r"\b(nan|inf)\b", html)


def test_nothing_to_draw_draws_nothing() -> None:
    assert draw(Chart("c", [], [Series("s", [])])) == ""
    assert draw(Chart("c", [1], [Series("s", [None])])) == ""


def test_smoothing_follows_the_curve_and_shrugs_off_outliers() -> None:
    line = [float(step) for step in range(50)]
    assert moving_average(line, span=5)[2:-2] == pytest.approx(line[2:-2])
    assert moving_median(line, span=5)[2:-2] == pytest.approx(line[2:-2])
    spiked = [1e30, *[2.0] * 20, None, *[2.0] * 20]
    assert moving_average(spiked, span=5)[10:21] == [2.0] * 11
    assert moving_median(spiked, span=5)[0] == 2.0
    assert moving_median(spiked, span=5)[21] is None
    assert not is_noisy(line)
    assert is_noisy([0.0, 1.0] * 20)
    assert is_noisy([1e6, *[0.0, 1.0] * 50])


def test_numbers_are_written_for_people() -> None:
    assert [units.duration(s) for s in (41, 725, 12_000, 183_600)] == [
        "0:41",
        "12:05",
        "3:20:00",
        "2d 03:00:00",
    ]
    assert [units.long_duration(s) for s in (0, 41, 725, 3600, 86_460)] == [
        "0 s",
        "41 s",
        "12 min 5 s",
        "1 h",
        "1 d",
    ]
    assert [units.count(v) for v in (41_230, 12.34, 0.0312, 1234.5)] == ["41,230", "12.3", "0.0312", "1,234"]
    assert [units.compact(v) for v in (41_200, 2.5e6, 0.25, 2.5e-4, 0)] == [
        "41.2k",
        "2.5M",
        "0.25",
        "2.5e-4",
        "0",
    ]
    assert [units.percent(v) for v in (0.031, 0.0012, 0)] == ["3.1%", "0.12%", "0.0%"]
    assert units.factor(0.1, 0) is None
    assert units.factor(0.3, 0.1) == "3.0x"
    assert [units.number(v) for v in (True, "1", None, math.nan, 10**400, 3)] == [None] * 5 + [3.0]


def test_where_the_time_went_is_told_in_the_numbers_of_the_log(tmp_path: Path) -> None:
    events = run_events()
    events.insert(-1, ranks_event())
    page = report_of(write_run(tmp_path / "demo", events))
    assert "3.5% of the time nothing was computed" in page.text
    assert "compute 96.5%" in page.text
    assert "waiting for the slowest rank 1.0%" in page.text
    assert "exposed communication 2.0%" in page.text
    assert "The others wait most for rank 1: it computes for 5.0% of the step more" in page.text
    assert "rank 0 20.0% rank 1 10.0%" in page.text


def test_the_top_says_when_where_what_and_by_which_version(tmp_path: Path) -> None:
    events = run_events(5)
    origin = {"host": "node7", "command": "freescale train run.out=x", "freescale": "0.1.0", "torch": "2.13"}
    events[0] |= {"time": 1_794_828_166.4, "origin": origin}
    elsewhere = {"event": "resume", "step": 3, "time": 1_794_831_766.0, "origin": origin | {"host": "node8"}}
    folder = write_run(tmp_path / "demo", [*events, elsewhere])
    html = write_report(folder).read_text()
    top = Page(html).text.partition("Steps 5 of 5")[0]
    for words in (
        "Started 2026-11-16 11:22 UTC on node7, freescale 0.1.0, torch 2.13",
        "Resumed after step 3, 2026-11-16 12:22 UTC on node8",
        "freescale train run.out=x",
    ):
        assert words in top
    # Not told twice: the facts of the start are data, model and plan.
    assert Page(html).text.count("node7") == 1


def test_a_time_that_is_no_date_is_left_out(tmp_path: Path) -> None:
    events = run_events(3)
    events[0] |= {"time": 1e60, "origin": "a machine"}
    assert "Started" not in report_of(write_run(tmp_path / "demo", events)).text


def test_the_configuration_is_folded(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "demo", run_events(5))).read_text()
    inside = html.partition("<details>")[2].partition("</details>")[0]
    assert "kind: hstu" in inside
    assert "<h2>Configuration</h2></summary>" in inside


def test_every_chart_names_both_axes_and_ends_at_a_tick(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "demo", run_events())).read_text()
    charts = re.findall(r'<figure class="chart.*?</figure>', html, flags=re.DOTALL)
    assert len(charts) == 9
    for chart in charts:
        names = re.findall(r"<b>([^<]+)</b></div>|axis\" aria-hidden=\"true\"><b>([^<]+)</b>", chart)
        assert len(names) == 2, chart[:300]
        assert names[1][0] == "step"
    (loss,) = [chart for chart in charts if "<h3>Loss</h3>" in chart]
    heights = [float(each) for each in re.findall(r"bottom:([\d.]+)%", loss)]
    assert (min(heights), max(heights)) == (0, 100), "the first and the last tick enclose the curve"
    assert ">120</span>" in loss, "the last step is on the axis"


def test_an_even_balance_looks_even(tmp_path: Path) -> None:
    events = run_events()
    for event in events:
        if event["event"] == "step":
            event["imbalance"] = 1.00002 + 0.0001 * (int(event["step"]) == 7)
    html = write_report(write_run(tmp_path / "demo", events)).read_text()
    (chart,) = re.findall(r"<h3>Balance</h3>.*?</figure>", html, flags=re.DOTALL)
    labels = re.findall(r'bottom:[\d.]+%">([^<]+)<', chart)
    assert labels == ["1.000", "1.002", "1.004", "1.006", "1.008", "1.010"]


def ranks_event() -> dict[str, object]:
    parts = {"compute": [8.0, 9.0], "straggler": [1.2, 0.2], "comm": [0.5, 0.5], "host": [0.3, 0.3]}
    return {"event": "ranks", "step": 120, "total": [10.0, 10.0], **parts}


def test_fields_of_features_have_sections_of_their_own(tmp_path: Path) -> None:
    events = run_events(40)
    for event in events:
        if event["event"] == "step":
            event |= {"overlap": 0.25, "exposed_bytes": 1e6, "hidden_bytes": 3e6, "parked_rows": 70}
            event |= {"exposed_ms": 2.5, "split_ms": 0.4, "id_evictions": 3, "imbalance_in_turn": 1.3}
    page = report_of(write_run(tmp_path / "demo", events))
    traffic = page.text.partition("Embedding traffic")[2].partition("Ids, step by step")[0]
    for words in ("Overlap", "Exposed bytes", "Hidden bytes", "Parked rows", "Exposed time", "Split time"):
        assert words in traffic
        assert words not in page.text.replace(traffic, ""), "one place for each"
    assert "Id evictions" in page.text.partition("Ids, step by step")[2]
    assert "samples dealt out in turn 23.1%" in page.text
    assert "as planned 0.40%" in page.text


BROWSER = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    "--virtual-time-budget=2000",
)


def in_browser(target: Path, profile: Path, script: str, *, width: int) -> str:
    """The page as Chromium sees it after a script ran in it; a console message fails the test."""
    target.write_text(target.read_text().replace("</body>", f"<script>{script}</script></body>"))
    size = (f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom", target.as_uri())
    browser = subprocess.run([*BROWSER, *size], capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in browser.stderr
    return browser.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [500, 1200])
def test_browser_draws_the_timeline_and_answers_the_pointer(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "demo", [*run_events(), ranks_event()])
    for rank in range(2):
        write_rank(folder, rank)
    script = """
        const view = document.querySelector(".view"), box = view.getBoundingClientRect();
        document.querySelector('button[data-do="in"]').click();
        document.querySelector('button[data-do="fit"]').click();
        const pointer = { clientX: box.left + 0.02 * box.width, clientY: box.top + 30 };
        view.dispatchEvent(new PointerEvent("pointermove", pointer));
        const pen = document.querySelector("canvas").getContext("2d");
        const seen = new Set(pen.getImageData(0, 35, view.clientWidth, 1).data);
        document.body.dataset.colours = seen.size;
        document.body.dataset.overflow = document.documentElement.scrollWidth > innerWidth;"""
    dom = in_browser(write_report(folder), tmp_path / "profile", script, width=width)
    assert re.search(r'class="timeline" data-ready="yes"', dom)
    assert 'data-overflow="false"' in dom
    assert int(re.search(r'data-colours="(\d+)"', dom)[1]) > 6
    told = re.search(r'class="tip" style="[^"]*">(.*?)</div></div>', dom)[1]
    # The first of 8 steps shown four at a time: 60 ms of work on rank 0.
    assert "forward and backward" in told
    assert "step 5, rank 0" in told
    assert "60.00 ms" in told


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH")
def test_browser_draws_the_report_without_complaint(tmp_path: Path) -> None:
    target = write_report(write_run(tmp_path / "demo", run_events()))
    touch = (
        'const plot = document.querySelectorAll(".plot")[2], box = plot.getBoundingClientRect();'
        'plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right, clientY: box.top}));'
        "document.body.dataset.overflow = document.documentElement.scrollWidth > innerWidth;"
    )
    dom = in_browser(target, tmp_path / "profile", touch, width=500)
    assert dom.count('data-ready="yes"') == dom.count('class="plot"') == 9
    assert 'data-overflow="false"' in dom
    assert re.search(r'class="tip" style="[^"]*"><div>step 120</div><div>.*?HR@10<b>0\.1200</b>', dom)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH")
def test_browser_cuts_no_rank_name_on_a_phone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", run_events())
    for rank in range(2):
        write_rank(folder, rank)
    spans = read_spans(folder)
    many = replace(spans, ranks=[replace(one, rank=1151 + one.rank) for one in spans.ranks])
    log = read_metrics(folder / "metrics.jsonl")
    (folder / "report.html").write_text(render_report("demo", log, config=CONFIG, spans=many))
    script = """
        // Headless windows are never narrower than 500 pixels: the page is.
        document.body.style.width = "390px";
        document.querySelector("select").dispatchEvent(new Event("change"));
        const labels = [...document.querySelectorAll(".labels div")];
        const cut = labels.filter((each) => each.scrollWidth > each.clientWidth + 1);
        document.body.dataset.cut = cut.map((each) => each.textContent).join();
        document.body.dataset.labels = labels.length;"""
    dom = in_browser(folder / "report.html", tmp_path / "profile", script, width=500)
    assert ">rank 1151</div>" in dom
    assert 'data-cut=""' in dom
    assert 'data-labels="4"' in dom


def test_the_page_speaks_of_tasks(tmp_path: Path) -> None:
    """One chart a metric with a curve a task; a row a task; deciles apart; the best by the metric that decided."""
    tasks = {"like": 0.7, "love": 0.6}
    events = [event for event in run_events() if event["event"] != "eval"]
    for number, step in enumerate((40, 80, 120)):
        metrics: dict[str, object] = {}
        for name, auc in tasks.items():
            metrics |= {f"auc/{name}": auc + 0.01 * number, f"ne/{name}": 0.9 + 0.05 * (number - 1) ** 2}
            metrics |= {f"calibration_{n}/{name}": 0.9 + n / 50 for n in range(1, 11)}
        events.insert(
            -1, {"event": "eval", "step": step, **metrics, "mse/stars": 1.25, "protocol": "requests"}
        )
    events[-1] |= {"event": "end", "best_metric": "test ne/love", "best_value": 0.9}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
    (folder / "config.yaml").write_text(CONFIG)
    text = write_report(folder).read_text()
    assert text.count("AUC</h3>") == 1
    assert "calibration_3" not in text
    assert "predicted over true, by decile" in text
    found = re.findall(r'<tr class="best"><td>([^<]*)</td><td>([^<]*)</td>', text)
    assert found == [("80", "like"), ("80", "love"), ("80", "stars")], found
    assert read_metrics(folder / "metrics.jsonl").best("ne/love") == (0.9, 80)
    assert read_metrics(folder / "metrics.jsonl").best("auc/like") == (0.72, 120)
