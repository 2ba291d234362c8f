"""`freescale simulate` as a user calls it: without torch, as text, JSON, page and timeline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from freescale import units
from freescale.app.cli import app
from freescale.errors import FreeScaleError
from freescale.sim.answers.keys import changed, known_keys, value_of
from freescale.sim.answers.whatif import EVERYTHING
from freescale.sim.command import described_keys, setting_before_changes

SMALL = ["--steps", "6", "workload.samples_per_gpu=4", "workload.table_rows=10000"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.timeout(300)
def test_it_never_loads_torch() -> None:
    code = (
        "import sys; sys.argv = ['freescale', 'simulate', '--gpus', '2', '--steps', '5', '--quick',"
        "'workload.samples_per_gpu=2'];\nfrom freescale.app.cli import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "import freescale.sim.answers.page, freescale.sim.answers.timeline; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    assert done.stdout.strip().endswith("False"), done.stdout


def test_the_table_says_that_it_is_a_prediction() -> None:
    output = run("--gpus", "4,2", "--quick", *SMALL)
    assert output.startswith("Predictions of a model, not measurements.")
    assert output.index("\n2 GPUs") < output.index("\n4 GPUs")
    assert "+ SM-free" in output


def test_what_the_pages_foretell_of_256_gpus_is_what_the_command_gives() -> None:
    """docs/predictions.md has 63.3 and 2.9 %; fewer steps differ by some tenths of a point."""
    answer = json.loads(run("--gpus", "256", "--cluster", "h100", "--steps", "24", "--quick", "--json"))
    first, *_, last = answer["rows"]
    assert first["name"] == "all off"
    assert first["bubble"] == pytest.approx(0.633, abs=0.02)
    assert last["name"].endswith("+ postpone")
    assert last["bubble"] == pytest.approx(0.029, abs=0.004)


def test_json_holds_every_row(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.arange(1, 500))
    output = run(
        "--gpus", "2,8", "--json", "--quick", "--lengths", str(lengths), "--price", "4", "--mtbf-hours", "1000",
        "--sweep", "features.window=1,2", *SMALL,
    )  # fmt: skip
    answer = json.loads(output)
    assert len(answer["rows"]) == 16
    assert answer["cluster"]["price_per_gpu_hour"] == 4
    assert answer["sweep"]["values"] == ["1", "2"]
    row = answer["rows"][-1]
    assert row["bubble"] == pytest.approx(row["straggler"] + row["comm"] + row["host"])
    assert row["cost_per_billion"] == pytest.approx(1e9 / row["tokens_per_s"] / 3600 * 8 * 4)
    assert {one["state"] for one in answer["confidence"]} >= {"extrapolated", "specified"}


def test_page_and_timeline_are_whole(tmp_path: Path) -> None:
    page, trace = tmp_path / "out" / "sim.html", tmp_path / "out" / "trace.json"
    run(
        "--gpus",
        "2,8",
        "--page",
        str(page),
        "--timeline",
        str(trace),
        "--sweep",
        "workload.zipf=0.8,1.0",
        *SMALL,
    )
    text = page.read_text()
    assert "Predictions of a model, not measurements." in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    for heading in (
        "Everything but one",
        "Which assumption moves it most",
        "Timeline, simulated",
        "Sweep of",
    ):
        assert heading in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {
        "forward and backward",
        "fetch NOL rows",
    }
    assert len({event["pid"] for event in events}) <= 3


def test_the_page_answers_before_it_warns_and_says_who_made_it(tmp_path: Path) -> None:
    page = tmp_path / "sim.html"
    run("--gpus", "2,8,64", "--quick", "--page", str(page), *SMALL)
    text = page.read_text()
    assert text.index("Scaling efficiency") < text.index("Extrapolated:") < text.index("A step on 64 GPUs")
    assert re.search(r"Made \d{4}-\d\d-\d\d \d\d:\d\d UTC on .*freescale ", text)
    assert "GPUs, logarithmic" in text
    # Eight lies on the way from 2 to 64 where equal factors take equal room.
    assert 'left:40.00%">8<' in text


def test_efficiency_above_one_is_explained_by_what_causes_it() -> None:
    """One GPU alone hides nothing; without prioritized communication many do not exceed it."""
    rows = json.loads(run("--gpus", "2", "--steps", "30", "--quick", "--json"))["rows"]
    above = [row["name"] for row in rows if row["efficiency"] > 1]
    assert above
    assert all("prioritized" in name for name in above)
    assert "Efficiency above 100 %: it is held against one GPU alone" in run(
        "--gpus", "2", "--steps", "30", "--quick"
    )


def test_a_data_set_gives_its_lengths(tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text(
        "".join(f"{user} {item}\n" for user in range(9) for item in range(5 + user))
    )
    from freescale.data.preparing.preparation import prepare

    prepare(tmp_path / "raw.txt", tmp_path / "set", format="pairs")
    answer = json.loads(run("--gpus", "2", "--json", "--quick", "--data", str(tmp_path / "set"), *SMALL))
    assert answer["workload"]["lengths"] == str(tmp_path / "set")
    # Four samples on each of two GPUs, of 5 to 13 events.
    tokens = answer["rows"][0]["tokens_per_s"] * answer["rows"][0]["step_ms"] / 1000
    assert 8 * 5 <= tokens <= 8 * 13


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "many"], "--gpus takes numbers of GPUs"),
        (["--gpus", "0"], "--gpus takes numbers of GPUs"),
        (["--cluster", "h101"], "there is no such cluster"),
        (["--profile", "nothing.json"], "cannot be read"),
        (["workload.sampels=3"], "workload.sampels is no number of a prediction"),
        (["samples"], "a change looks like"),
        (["--sweep", "nothing"], "--sweep takes a key and values"),
        (["--sweep", "cluster.nic=1,2"], "cluster.nic is no number"),
        (["--data", "nowhere"], "there are no lengths"),
        (["--data", "set", "--lengths", "fixed:3"], "--data set --lengths fixed:3"),
        (["--lengths", "fixed:3", "workload.lengths=fixed:4"], "given twice"),
        (["--lengths", "fixed:-3"], "lengths of at least 1"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], said: str) -> None:
    with pytest.raises(FreeScaleError) as caught:
        CliRunner().invoke(app, ["simulate", "--quick", *arguments], catch_exceptions=False)
    assert said in str(caught.value)


def test_keys_are_listed() -> None:
    output = run("--keys")
    assert "cluster.nic_gb_per_s" in output


def test_keys_show_what_they_are_unless_changed() -> None:
    def defaults(**names: str) -> dict[str, str]:
        return {key: default for key, default, _ in described_keys(**names)}

    shown = defaults(profile="h200", cluster="h100")
    assert set(shown) == set(known_keys())
    setting = setting_before_changes(profile="h200", cluster="h100")
    for key, text in shown.items():
        # What is shown can be typed, and changes nothing.
        same, features = changed(setting, EVERYTHING, key, text)
        assert value_of(same, features, key) == pytest.approx(value_of(setting, EVERYTHING, key)), key
    assert shown["workload.samples_per_gpu"] == "32"
    assert shown["features.prioritized"] == "true"
    other = defaults(profile="cpu-aarch64", cluster="cpu")
    assert other["cluster.peak_tflops"] != shown["cluster.peak_tflops"]
    assert other["setting.jitter"] != shown["setting.jitter"]
    output = run("--keys")
    assert f" {shown['cluster.peak_tflops']} " in output
    assert all(f" {key} " in output for key in shown), "a key is cut"


def test_a_sweep_is_a_row_a_value() -> None:
    asked = ("--gpus", "2,8", "--quick", "--sweep", "workload.zipf=0.5,1.5", *SMALL)
    lines = run(*asked).splitlines()
    (head,) = [place for place, line in enumerate(lines) if line.startswith("workload.zipf ")]
    rows = json.loads(run("--json", *asked))["sweep"]["rows"]
    assert rows[0]["step_ms"] != rows[1]["step_ms"]
    for line, value, row in zip(lines[head + 1 :], ("0.5", "1.5"), rows):
        assert line.split()[0] == value
        assert units.milliseconds(row["step_ms"]) in line
        assert units.percent(row["bubble"]) in line
    assert lines[head + 3].startswith("Sweep of workload.zipf on 8 GPUs, ")


def test_one_gpu_is_one_and_has_nothing_to_reduce() -> None:
    output = run("--gpus", "1,2", "--quick", *SMALL)
    assert "\n1 GPU  " in output
    assert "1 GPUs" not in output
    assert "1 GPU: bubble" not in output
    assert "\n2 GPUs: bubble " in output


def test_what_is_extrapolated_and_what_a_row_means_is_said() -> None:
    output = run("--gpus", "2", "--quick", *SMALL)
    confidence = json.loads(run("--gpus", "2", "--quick", "--json", *SMALL))["confidence"]
    parts = [one["part"] for one in confidence if one["state"] == "extrapolated"]
    assert f"not measured, {len(parts)} of {len(confidence)} parts: {', '.join(parts)}." in output
    assert "KK-equal: Karmarkar-Karp with equal counts" in output


def test_ranks_on_a_cpu_are_not_called_gpus(tmp_path: Path) -> None:
    page = tmp_path / "answer.html"
    output = run("--gpus", "1,2", "--cluster", "cpu", "--profile", "cpu-aarch64", "--page", str(page), *SMALL)
    assert "\n1 rank  " in output
    assert "\n2 ranks: bubble " in output
    assert "4 samples a rank" in output
    for text in (output, page.read_text()):
        assert not re.search(r"\d GPU|a GPU|one GPU", text)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("workload.rows", "workload.table_rows?"),
        ("workload.sampels_per_gpu", "workload.samples_per_gpu?"),
        ("workload.bytes", "workload.row_bytes or workload.dense_bytes or workload.bucket_bytes?"),
        ("zipf", "workload.zipf?"),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(FreeScaleError, match="no number") as caught:
        CliRunner().invoke(app, ["simulate", f"{key}=3"], catch_exceptions=False)
    assert caught.value.next_step == f"did you mean {meant}"
    assert caught.value.allowed is None


def test_an_unknown_key_that_is_like_no_other_leads_to_the_list() -> None:
    """cluster.foo was taken for cluster.peak_tflops: they share a section."""
    with pytest.raises(FreeScaleError, match="no number") as caught:
        CliRunner().invoke(app, ["simulate", "cluster.foo=3"], catch_exceptions=False)
    assert "did you mean" not in str(caught.value)
    assert str(caught.value.allowed).startswith("cluster.gpus_per_node, ")
    assert "workload." not in str(caught.value.allowed)
    assert "--keys" in str(caught.value.next_step)


def test_all_changes_that_are_wrong_are_told_at_once() -> None:
    changes = ["cluster.foo=3", "workload.zipf=9", "worklod.zipf=1", "workload.samples_per_gpu=4"]
    with pytest.raises(FreeScaleError, match="3 problems in the changes") as caught:
        CliRunner().invoke(app, ["simulate", *changes], catch_exceptions=False)
    assert [line.split()[1].rstrip(":") for line in str(caught.value).splitlines()[1:4]] == [
        change.partition("=")[0] for change in changes[:3]
    ]
    assert "did you mean workload.zipf?" in str(caught.value)


def test_a_profile_of_a_cpu_is_of_ranks_of_one_machine() -> None:
    """H100s were taken without a word: their name and price over compute of a CPU."""
    output = run("--gpus", "2", "--profile", "cpu-aarch64", "--quick", *SMALL)
    assert "CPU ranks of one machine" in output.splitlines()[0]
    assert "H100" not in output
    assert "No --cluster was named, and the profile is of a CPU" in output
    named = run("--gpus", "2", "--profile", "cpu-aarch64", "--cluster", "cpu", "--quick", *SMALL)
    assert "No --cluster was named" not in named
    assert output.splitlines()[:4] == named.splitlines()[:4]
    assert run("--gpus", "2", "--quick", *SMALL).splitlines()[0].split("measurements. ")[1].startswith("H100")


@pytest.mark.parametrize(
    ("profile", "cluster", "step"),
    [("cpu-aarch64", "h100", "leave --cluster out"), ("h200", "cpu", "choose --cluster h100")],
)
def test_compute_of_a_cpu_in_a_cluster_of_gpus_is_refused(profile: str, cluster: str, step: str) -> None:
    asked = ["simulate", "--profile", profile, "--cluster", cluster]
    for further in ([], ["--keys"]):
        with pytest.raises(FreeScaleError, match="the profile is of a") as caught:
            CliRunner().invoke(app, [*asked, *further], catch_exceptions=False)
        assert step in str(caught.value.next_step)


def test_a_cluster_file_of_cpu_ranks_says_so(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text("base: cpu\nname: ours\nprice_per_gpu_hour: 1\n")
    assert setting_before_changes(profile="cpu-aarch64", cluster=str(ours)).cluster.device == "cpu"
    ours.write_text("base: h100\ndevice: abacus\n")
    with pytest.raises(FreeScaleError, match="device: allowed: cpu, cuda; got 'abacus'"):
        setting_before_changes(profile="cpu-aarch64", cluster=str(ours))


def test_efficiency_above_one_where_nothing_is_hidden_is_not_laid_to_hiding() -> None:
    """Ten steps draw batches that suit two ranks; that was explained by communication which is off in that row."""
    asked = ("--gpus", "2", "--profile", "cpu-aarch64", "--quick", "--steps", "10")
    rows = json.loads(run(*asked, "--json"))["rows"]
    assert next(row for row in rows if row["name"] == "balance")["efficiency"] > 1
    output = run(*asked)
    assert "Efficiency above 100 % on 2 ranks also where nothing is hidden" in output
    assert "prioritized communication does most" not in output
