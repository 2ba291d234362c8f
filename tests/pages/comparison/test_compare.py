"""Runs side by side: by name, with how sure each difference is, and what keeps them from being comparable."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.errors import DataError, FreeScaleError
from freescale.pages.comparison.compare import comparison_lines, write_comparison
from freescale.pages.comparison.compared_runs import MOST_RUNS, doubts, read_runs
from freescale.pages.comparison.differences import differences, machine_doubts
from tests.pages.test_report import Page


def write_run(
    folder,
    *,
    straggler,
    steps=60,
    ranks=2,
    tokens=1000,
    step_ms=100.0,
    balance="true",
    noise=0.0,
    seed=0,
    **start,
):
    """A run of like steps, the first one slower, as metrics.jsonl keeps it; `noise` is the spread of its waits."""
    folder.mkdir(parents=True)
    draw_from = random.Random(f"{seed} {folder.name}")
    lines = [{"event": "start", "facts": {}, "origin": start, "time": 1.8e9}] if start else []
    for step in range(1, steps + 1):
        ms = 9000.0 if step == 1 else step_ms
        wait = straggler * max(0.0, 1 + noise * draw_from.gauss(0, 1))
        shares = {"straggler": wait, "comm": 0.05, "host": 0.05, "bubble": wait + 0.1}
        # What is waited more comes on top of the work.
        ms *= (1 - straggler - 0.1) / (1 - wait - 0.1)
        rate = 1000 * tokens / ms
        lines.append(
            {"event": "step", "step": step, "loss": 4.0 / step, "step_ms": ms, "tokens_per_s": rate, **shares}
        )
    total = [1.0] * ranks
    parts = dict.fromkeys(("compute", "straggler", "comm"), total)
    lines.append({"event": "ranks", "step": steps, "total": total, **parts})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(f"run: {{out: {folder}, seed: 1}}\nbalance: {{enabled: {balance}}}\n")
    return folder


@pytest.fixture
def two(tmp_path):
    """Balance off, and on: a third of the waiting is gone, compute is the same 90 ms."""
    off = write_run(tmp_path / "off", straggler=0.3, step_ms=150.0, balance="false", noise=0.1)
    return off, write_run(tmp_path / "on", straggler=0.02, step_ms=90.0 / 0.88, noise=0.1)


def test_runs_are_called_by_their_names_and_every_cause_is_shown(two):
    off, on = two
    page = Page(write_comparison(on, [off]).read_text())
    for words in (
        "on against off same samples",
        "Bubble 70",
        "off 40",
        "on 12.0%",
        "waiting for the slowest rank 30",
        "balance.enabled no yes",
        "99 % intervals, from the spread over 59 steps in 7 blocks",
        "apart at any step",
    ):
        assert words in page.text, words
    assert " before" not in page.text.replace("the step before", "")
    assert "run.out" not in page.text
    assert page.titles() == ["Bubble", "Step time", "Loss"]


def test_a_difference_beyond_noise_is_called_with_its_interval(two):
    off, on = two
    found = differences(read_runs([off, on]), 1)
    bubble, step = found["bubble"], found["step"]
    assert bubble.is_sure
    assert step.is_sure
    truth = 0.12 / 0.4 - 1
    assert bubble.change.low < truth < bubble.change.high
    assert bubble.verdict().endswith("% less")
    assert step.verdict(less="shorter", more="longer").endswith("% shorter")


def test_a_difference_within_noise_is_called_neither_gain_nor_loss(tmp_path):
    off = write_run(tmp_path / "off", straggler=0.3, balance="false", noise=0.8, seed=1)
    on = write_run(tmp_path / "on", straggler=0.29, noise=0.8, seed=2)
    lines = comparison_lines(on, [off])
    assert sum("no difference beyond noise (" in line for line in lines) >= 1
    assert not any(
        line.split(": ")[-1][:1].isdigit() for line in lines if line.startswith(("bubble", "step"))
    )
    page = Page(write_comparison(on, [off]).read_text())
    assert "Bubble no difference beyond noise" in page.text
    assert not any(attrs.get("class") == "best" for tag, attrs in page.tags if tag == "tr")


def test_what_only_the_machine_changed_is_no_gain(tmp_path):
    """Compute of the same samples took half the time: balance cannot have done that."""
    off = write_run(tmp_path / "off", straggler=0.3, step_ms=200.0, balance="false", noise=0.1)
    on = write_run(tmp_path / "on", straggler=0.3, step_ms=100.0, noise=0.1, seed=3)
    runs = read_runs([off, on])
    found = differences(runs, 1)
    assert found["step"].change.is_sure
    assert not found["step"].is_sure
    assert found["step"].verdict() == "compute differs: see the notes"
    (said,) = machine_doubts(runs)
    assert "took 50" in said
    assert "% less compute time in on than in off" in said
    assert f"warning: {said}" in comparison_lines(on, [off])


def test_another_machine_or_model_may_compute_faster(tmp_path):
    slow = write_run(tmp_path / "a", straggler=0.3, step_ms=200.0, noise=0.1, host="one", freescale="1")
    fast = write_run(tmp_path / "b", straggler=0.3, step_ms=100.0, noise=0.1, host="two", freescale="1")
    runs = read_runs([slow, fast])
    assert differences(runs, 1)["step"].is_sure
    assert machine_doubts(runs) == []
    assert doubts(runs) == ["The runs have different machines: a one, b two."]
    text = (fast / "config.yaml").read_text() + "model: {dim: 8}\n"
    (fast / "config.yaml").write_text(text)
    lines = (fast / "metrics.jsonl").read_text().replace('"two"', '"one"')
    (fast / "metrics.jsonl").write_text(lines)
    assert differences(read_runs([slow, fast]), 1)["step"].is_sure


def test_repeats_of_a_run_say_what_a_repeat_changes(tmp_path):
    """Two starts of one recipe differ by 20 %: a third run that differs by less is not called better."""
    base = write_run(tmp_path / "off1", straggler=0.30, balance="false", noise=0.02)
    repeat = write_run(tmp_path / "off2", straggler=0.24, balance="false", noise=0.02)
    other = write_run(tmp_path / "on", straggler=0.27, noise=0.02)
    alone = differences(read_runs([base, other]), 1)["bubble"]
    assert alone.is_sure
    runs = read_runs([base, repeat, other])
    assert differences(runs, 2)["bubble"].verdict() == "no more than repeats differ"
    lines = comparison_lines(other, [base, repeat])
    assert "off2 against off1:" in lines
    assert "on against off1:" in lines
    assert "runs of one recipe differ by up to 17" in lines[-1]


def test_few_steps_tell_nothing(tmp_path):
    off = write_run(tmp_path / "off", straggler=0.3, balance="false", steps=35)
    on = write_run(tmp_path / "on", straggler=0.02, steps=35)
    lines = comparison_lines(on, [off])
    assert lines[-3] == "bubble 40.0% -> 12.0%: too few steps to tell"
    assert lines[-1].startswith("Fewer than 40 common steps")


def test_more_than_two_runs_have_a_row_a_bar_and_a_curve_each(tmp_path):
    folders = [
        write_run(tmp_path / name, straggler=wait, noise=0.05, balance=name == "three")
        for name, wait in (("one", 0.3), ("two", 0.2), ("three", 0.1))
    ]
    page = Page(write_comparison(folders[2], folders[:2]).read_text())
    assert "2 runs against one" in page.text
    bars = page.text.partition("Where the time went")[2].partition("By cause")[0]
    for name in ("one", "two", "three"):
        assert f" {name} " in bars
    assert "share of a step one two three" in page.text
    spoken = [attrs["aria-label"] for tag, attrs in page.tags if attrs.get("class") == "plot"]
    assert all(name in spoken[0] for name in ("one from", "two from", "three from"))
    assert (folders[2] / "compare.html").exists()


def test_folders_of_one_name_are_told_apart(tmp_path):
    first = write_run(tmp_path / "a" / "run", straggler=0.3)
    second = write_run(tmp_path / "b" / "run", straggler=0.3)
    assert [run.name for run in read_runs([first, second])] == ["a/run", "b/run"]


def test_too_many_runs_are_refused(tmp_path):
    run = write_run(tmp_path / "a", straggler=0.3)
    with pytest.raises(DataError, match="too many runs"):
        read_runs([run] * (MOST_RUNS + 1))


def test_runs_of_other_samples_or_ranks_are_not_called_the_same(tmp_path):
    before = write_run(tmp_path / "a", straggler=0.3)
    other = write_run(tmp_path / "b", straggler=0.3, tokens=900, ranks=4)
    said = " ".join(doubts(read_runs([before, other])))
    assert "b did not compute the same samples as a: 60 of 60 common steps" in said
    assert "different numbers of ranks: a 2, b 4" in said
    again = write_run(tmp_path / "c", straggler=0.3)
    assert doubts(read_runs([before, again])) == []


def test_only_common_steps_count(tmp_path):
    before = write_run(tmp_path / "a", straggler=0.3, steps=50)
    after = write_run(tmp_path / "b", straggler=0.1, steps=90)
    lines = (after / "metrics.jsonl").read_text().splitlines()
    late = [line.replace('"straggler": 0.1', '"straggler": 0.7') for line in lines[50:]]
    (after / "metrics.jsonl").write_text("\n".join(lines[:50] + late) + "\n")
    (shown,) = [line for line in comparison_lines(after, [before]) if line.startswith("bubble")]
    assert shown.startswith("bubble 40.0% -> 20.0%: 50.0% less")


def test_runs_without_a_breakdown_or_a_common_step_say_so(tmp_path):
    good = write_run(tmp_path / "a", straggler=0.3)
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.yaml").write_text("- not a mapping\n")
    (folder / "metrics.jsonl").write_text('{"event": "step", "step": 99, "loss": 1.0}\n')
    assert doubts(read_runs([good, folder])) == [
        "a has no breakdown of its time in metrics.jsonl.",
        "b has no breakdown of its time in metrics.jsonl.",
        "The runs have no step in common.",
    ]
    assert "has no breakdown" in write_comparison(good, [folder]).read_text()
    lines = comparison_lines(good, [folder])
    assert lines[-1] == "warning: The runs have no step in common."
    assert not any(line.startswith("bubble") for line in lines)


def test_the_command(two):
    off, on = two
    result = CliRunner().invoke(app, ["report", str(on), "--compare", str(off)])
    assert result.exit_code == 0, result.output
    assert (on / "compare.html").exists()
    assert (on / "report.html").exists()
    lines = result.output.splitlines()[2:]
    assert lines[0].startswith("bubble 40")
    assert "% less (" in lines[0]
    assert lines[1].startswith("step 15")
    assert "% shorter (" in lines[1]
    wrong = CliRunner().invoke(app, ["report", str(off), str(on)])
    assert isinstance(wrong.exception, FreeScaleError)
    assert f"freescale report {on} --compare {off}" in str(wrong.exception.next_step)


def test_the_command_takes_several_runs_after_one_option(tmp_path, two):
    off, on = two
    third = write_run(tmp_path / "third", straggler=0.2, step_ms=90 / 0.7, noise=0.1)
    for words in (
        [str(third), "--compare", str(off), str(on)],
        ["--compare", str(off), "--compare", str(on), "--", str(third)],
    ):
        result = CliRunner().invoke(app, ["report", *words])
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert "on against off:" in result.output
        assert "third against off:" in result.output
    nobody = CliRunner().invoke(app, ["report", "--compare", str(off), str(on)])
    assert isinstance(nobody.exception, FreeScaleError)
    assert nobody.exception.next_step == f"freescale report {on} --compare {off}"


def test_the_terminal_tells_doubts_and_a_worse_run_too(tmp_path):
    before = write_run(tmp_path / "off", straggler=0.1, noise=0.1, step_ms=80 / 0.8)
    after = write_run(
        tmp_path / "on", straggler=0.2, tokens=900, noise=0.1, step_ms=80 / 0.7, balance="false"
    )
    result = CliRunner().invoke(app, ["report", str(after), "--compare", str(before)])
    assert "warning: on did not compute the same samples as off: 60 of 60" in result.output
    assert "% more (" in result.output
    assert "% longer (" in result.output
    assert "warning" not in CliRunner().invoke(app, ["report", str(after), "--compare", str(after)]).output


@pytest.mark.parametrize(
    "options",
    [
        ["--out", "x.html"],
        ["--trace", "--compare", "other"],
        ["--live", "--compare", "other"],
        ["--live", "--trace"],
        ["--port", "4000"],
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path, options):
    run = write_run(tmp_path / "on", straggler=0.02)
    wrong = CliRunner().invoke(app, ["report", str(run), *options])
    assert isinstance(wrong.exception, FreeScaleError), wrong.output
    assert options[0].strip("-") in str(wrong.exception)
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
    assert "Test HR@10 0.2000 -> 0.2500" in comparison_lines(alike, [before])
    assert "Test HR@10 0.2500 a 0.2000" in Page(write_comparison(alike, [before]).read_text()).text
    lines = comparison_lines(other, [before])
    assert any(line.startswith("warning: The runs were not judged alike") for line in lines)
    assert not any("HR@10" in line for line in lines)
    page = Page(write_comparison(other, [before]).read_text())
    assert f"a by {full}; c by sampled ranking among 99 items" in page.text
    assert "0.7000" not in page.text
    several = comparison_lines(other, [before, alike])
    assert several.count("Test HR@10 0.2000 -> 0.2500") == 1


def test_losses_of_runs_of_different_lengths_are_those_of_one_step(tmp_path):
    """Before, the last loss of each stood beside the other, and nobody said that one run had ended earlier."""
    long, short = (write_run(tmp_path / f"of{n}", straggler=0.2, steps=n) for n in (60, 50))
    page = Page(write_comparison(short, [long]).read_text())
    assert "The runs end at different steps: of60 60, of50 50." in page.text
    assert "Loss at step 50 0.08" in page.text
    assert "of60 0.08" in page.text
    assert "Final loss" not in page.text


def test_metrics_of_a_run_that_goes_on_are_those_of_one_step(tmp_path):
    """Before, the last evaluation of each: 0.4590 at step 192 beside 0.1537 at step 24, where both had 0.1537."""
    runs = [write_run(tmp_path / f"of{n}", straggler=0.2, steps=n) for n in (60, 50)]
    for folder, steps in zip(runs, ((30, 60), (30, 50)), strict=True):
        with (folder / "metrics.jsonl").open("a") as file:
            for step in steps:
                event = {
                    "event": "eval",
                    "step": step,
                    "split": "valid",
                    "hr@10": step / 100,
                    "protocol": "full",
                }
                file.write(json.dumps(event) + "\n")
    quality = [line for line in comparison_lines(runs[1], [runs[0]]) if "HR@10" in line]
    assert quality == ["Validation HR@10 at step 30 0.3000 -> 0.3000"]


def test_a_run_that_is_named_twice_is_no_repeat(two):
    off, on = two
    for runs in ([off, on, on], [on, on.parent / "." / on.name]):
        with pytest.raises(DataError, match="compared with itself"):
            read_runs(runs)
