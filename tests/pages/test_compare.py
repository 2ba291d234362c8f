"""Two runs side by side: the reduction, and what keeps them from being comparable."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.errors import FreeScaleError
from freescale.pages.compare import comparison_lines, doubts, read_run, reduction, write_comparison
from tests.pages.test_report import Page


def write_run(folder, *, straggler, steps=40, ranks=2, tokens=1000, step_ms=100.0, balance="true"):
    """A run of equal steps, the first one slower, as metrics.jsonl keeps it."""
    folder.mkdir()
    shares = {"straggler": straggler, "comm": 0.05, "host": 0.05, "bubble": straggler + 0.1}
    lines = []
    for step in range(1, steps + 1):
        ms = 9000.0 if step == 1 else step_ms
        rate = 1000 * tokens / ms
        lines.append(
            {"event": "step", "step": step, "loss": 4.0 / step, "step_ms": ms, "tokens_per_s": rate, **shares}
        )
    total = [1.0] * ranks
    lines.append(
        {
            "event": "ranks",
            "step": steps,
            "total": total,
            **dict.fromkeys(("compute", "straggler", "comm"), total),
        }
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"run: {{out: {folder}, seed: 1}}\nbalance: {{enabled: {balance}}}\n")
    return folder


def test_the_reduction_and_every_cause_are_shown(tmp_path):
    before = write_run(tmp_path / "off", straggler=0.3, step_ms=150.0, balance="false")
    after = write_run(tmp_path / "on", straggler=0.02)
    page = Page(write_comparison(after, before).read_text())
    for words in (
        "on against off same samples",
        "Bubble reduction 70.0% 40.0% before, 12.0% after",
        "Steps are faster by 1.5x 150.0 ms before, 100.0 ms after",
        "waiting for the slowest rank 30.0% 2.0% 45.0 ms 2.0 ms 93.3%",
        "exposed communication 5.0% 5.0% 7.5 ms 5.0 ms 0.0%",
        "the whole bubble 40.0% 12.0% 60.0 ms 12.0 ms 70.0%",
        "balance.enabled no yes",
    ):
        assert words in page.text, words
    assert "run.out" not in page.text
    assert page.titles() == ["Bubble", "Step time", "Loss"]


def test_runs_of_other_samples_or_ranks_are_not_called_the_same(tmp_path):
    before = read_run(write_run(tmp_path / "a", straggler=0.3))
    other = read_run(write_run(tmp_path / "b", straggler=0.3, tokens=900, ranks=4))
    said = " ".join(doubts(before, other))
    assert "40 of 40 common steps have another number of tokens, first step 1" in said
    assert "different numbers of ranks: 2 before, 4 after" in said
    assert doubts(before, before) == []


def test_only_common_steps_count(tmp_path):
    before = write_run(tmp_path / "a", straggler=0.3, steps=20)
    after = write_run(tmp_path / "b", straggler=0.1, steps=40)
    lines = (after / "metrics.jsonl").read_text().replace('"straggler": 0.1', '"straggler": 0.1').splitlines()
    late = [line.replace('"straggler": 0.1', '"straggler": 0.7') for line in lines[20:]]
    (after / "metrics.jsonl").write_text("\n".join(lines[:20] + late) + "\n")
    assert (
        "Bubble reduction 50.0% 40.0% before, 20.0% after"
        in Page(write_comparison(after, before).read_text()).text
    )


def test_runs_without_a_breakdown_or_a_common_step_say_so(tmp_path):
    good = read_run(write_run(tmp_path / "a", straggler=0.3))
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.yaml").write_text("- not a mapping\n")
    (folder / "metrics.jsonl").write_text('{"event": "step", "step": 99, "loss": 1.0}\n')
    empty = read_run(folder)
    assert doubts(good, empty) == [
        "b has no breakdown of its time in metrics.jsonl.",
        "The runs have no step in common.",
    ]
    assert "has no breakdown" in write_comparison(tmp_path / "a", folder).read_text()


def test_nothing_to_reduce_has_no_reduction():
    assert reduction(0.0, 0.1) is None
    assert reduction(0.5, 0.05) == pytest.approx(0.9)


def test_the_command(tmp_path):
    before = write_run(tmp_path / "off", straggler=0.3)
    after = write_run(tmp_path / "on", straggler=0.02)
    result = CliRunner().invoke(app, ["report", str(after), "--compare", str(before)])
    assert result.exit_code == 0, result.output
    assert (after / "compare.html").exists()
    assert (after / "report.html").exists()
    assert result.output.splitlines()[2:] == [
        "bubble 40.0% -> 12.0%, 70.0% less",
        "step 100.0 ms -> 100.0 ms",
    ]
    wrong = CliRunner().invoke(app, ["report", str(after), str(before)])
    assert isinstance(wrong.exception, FreeScaleError)
    assert "--compare OTHER_DIR" in str(wrong.exception)


def test_the_terminal_tells_doubts_and_a_worse_run_too(tmp_path):
    before = write_run(tmp_path / "off", straggler=0.1)
    after = write_run(tmp_path / "on", straggler=0.2, tokens=900)
    result = CliRunner().invoke(app, ["report", str(after), "--compare", str(before)])
    assert "warning: The runs did not compute the same samples: 40 of 40" in result.output
    assert "bubble 20.0% -> 30.0%, 50.0% more" in result.output
    assert "warning" not in CliRunner().invoke(app, ["report", str(after), "--compare", str(after)]).output


def test_the_terminal_has_no_numbers_where_a_run_has_none(tmp_path):
    good = write_run(tmp_path / "a", straggler=0.3)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"event": "step", "step": 99, "loss": 1.0}\n')
    lines = comparison_lines(good, tmp_path / "b")
    assert lines[-1] == "warning: The runs have no step in common."
    assert not any(line.startswith("bubble") for line in lines)


def test_options_that_would_do_nothing_are_refused(tmp_path):
    run = write_run(tmp_path / "on", straggler=0.02)
    page = tmp_path / "x.html"
    for options in (["--out", str(page)], ["--trace", "--compare", str(run)]):
        wrong = CliRunner().invoke(app, ["report", str(run), *options])
        assert isinstance(wrong.exception, FreeScaleError), wrong.output
        assert "--trace" in str(wrong.exception)
    assert not page.exists()
    assert not (run / "report.html").exists()


def add_eval(folder, *, protocol, value):
    event = {"event": "eval", "step": 40, "split": "test", "hr@10": value, "protocol": protocol}
    along = {**event, "split": "valid"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(along) + "\n" + json.dumps(event) + "\n")
    return folder


def test_metrics_are_compared_only_where_both_runs_were_judged_alike(tmp_path):
    full = "full ranking, seen filtered, 100 items"
    before = add_eval(write_run(tmp_path / "a", straggler=0.3), protocol=full, value=0.2)
    alike = add_eval(write_run(tmp_path / "b", straggler=0.02), protocol=full, value=0.25)
    other = add_eval(
        write_run(tmp_path / "c", straggler=0.02), protocol="sampled ranking among 99 items", value=0.7
    )
    assert "test HR@10 0.2000 -> 0.2500" in comparison_lines(alike, before)
    assert "test HR@10 0.2500 0.2000 before" in Page(write_comparison(alike, before).read_text()).text
    lines = comparison_lines(other, before)
    assert any(line.startswith("warning: The runs were not judged alike") for line in lines)
    assert not any("HR@10" in line for line in lines)
    page = Page(write_comparison(other, before).read_text())
    assert f"{full} before; sampled ranking among 99 items after" in page.text
    assert "0.7000" not in page.text
