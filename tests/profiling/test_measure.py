"""Profiles measured here, on small models: whole, readable, and true to what was planted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from freescale import profiling
from freescale.app.cli import app
from freescale.balance.costs.cost_fit import MeasuredStep
from freescale.comm.world.shared_gpu.shares import Shared
from freescale.errors import ConfigError, TrainingError
from freescale.kernels.runtime import PostponedGradients
from freescale.profiling import fits, measure
from freescale.profiling.loop_times import LoopTimes
from freescale.profiling.side_by_side import InARun, SideBySide, measure_side_by_side
from freescale.profiling.step_times import FEWEST_SHAPES, StepTimes, measure_steps, shapes
from freescale.recipe import Config, load_config
from freescale.sim.inputs.profile import TIMES, Timing, parse_profile
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

SMALL = (
    "synthetic.users=120", "synthetic.items=60", "data.max_length=40", "model.dim=16", "head.num_negatives=4",
)  # fmt: skip
LINES = ("host", "host_hiding", "row_work", "row_work_hiding", "exchanges", "exchanges_hiding")
RATES = {
    "exchange_us": 100.0,
    "exchange_gb_per_s": 1.0,
    "sum_us": 90.0,
    "sum_gb_per_s": 0.5,
    "control_us": 900.0,
}


def pretend(config: Config, *, num_ranks: int, **_: Any) -> SideBySide:
    """Ranks that are twice as slow side by side, and talk the slower the more they are."""
    steps = StepTimes(dense_parameters=10, row_bytes=64)
    lengths = [(n, 10 * n + n % 7, float(40 * n * n + n % 3)) for n in range(1, 30)]
    for name in steps.steps:
        steps.steps[name] = [MeasuredStep(*one, ms=1 + 0.1 * one[1]) for one in lengths]
    steps.singles = steps.steps["forward"]
    lines = {name: Timing(fixed_ms=1.0 + number) for number, name in enumerate(LINES)}
    rates = {name: num_ranks * rate for name, rate in RATES.items()}
    plain, hiding = (
        [MeasuredStep(*one, ms=slow * (2 + 0.3 * one[1])) for one in lengths] for slow in (1.0, 1.1)
    )
    in_a_run = InARun(plain, hiding, [MeasuredStep(1, 10, 100.0, ms=7.0)])
    return SideBySide(f"{config.run.device}, shared by {num_ranks}", steps, in_a_run, lines, rates)


def test_a_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(config: Config, *, num_ranks: int, **options: Any) -> SideBySide:
        found = pretend(config, num_ranks=num_ranks, **options)
        return replace(found, rates=found.rates | ({"sum_gb_per_s": 0.2} if num_ranks == 4 else {}))

    monkeypatch.setattr(measure, "measure_side_by_side", crowded)
    threads, said = torch.get_num_threads(), []
    profile = measure.measure_profile(
        load_config(None, SMALL), device="cpu", seconds=0.1, most_samples=8, command="test", say=said.append
    )
    assert torch.get_num_threads() == threads
    assert set(profile.times) == {*TIMES, "host_hiding", "weights", "optim_by_layer"}
    backward, weights = (
        float(profile.times[name].seconds(samples=8, tokens=200, squares=6000))
        for name in ("backward", "weights")
    )
    assert 0 < weights < backward
    assert profile.rates["longest_profiled"] == 40
    assert 0 < profile.rates["cost_error"] < 5
    assert all(f"times.{name}" in profile.measured for name in TIMES)
    assert profile.model["row_bytes"] == 64
    assert profile.times["forward"].seconds(samples=8, tokens=200, squares=6000) > 0
    assert profile.times["host_hiding"].fixed_ms == 2.0
    assert profile.rates["exchange_us"] == 2 * RATES["exchange_us"]
    assert profile.rates["exchange_us_per_rank"] == RATES["exchange_us"]
    # Four of these ranks add up more slowly than two, and exchange twice as fast: that adds nothing.
    assert profile.rates["sum_gb_per_s"] == 2 * RATES["sum_gb_per_s"]
    assert profile.rates["sum_s_per_gb_per_rank"] == pytest.approx((1 / 0.2 - 1 / 1.0) / 2)
    assert profile.rates["exchange_s_per_gb_per_rank"] == 0.0
    assert 0 <= profile.jitter < 5
    assert parse_profile(profile.to_json(), where="test") == profile
    assert len(said) == 3


@pytest.mark.parametrize(("load", "said"), [(0.4, False), (3.1, True)])
def test_a_profile_of_a_busy_machine_is_said_to_be_one(
    load: float, said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "measure_side_by_side", pretend)
    monkeypatch.setattr(measure.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    out = tmp_path / "profile.json"
    options = ["--device", "cpu", "--seconds", "1", "--samples", "4", "--out", str(out), *SMALL]
    shown = CliRunner().invoke(app, ["profile", *options], catch_exceptions=False).output
    assert json.loads(out.read_text())["facts"]["load_average"] == load
    assert ("load average 3.1 on 2 cores" in " ".join(shown.split())) is said


def test_weight_gradients_without_room_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A profile lets them keep what a run would: with less of it they are computed at once, and not measured."""
    monkeypatch.setattr(measure, "measure_side_by_side", pretend)
    out = tmp_path / "profile.json"
    said = []
    for room in ("pipeline.postpone_mb=0.05", "pipeline.postpone_mb=null"):
        options = ["--device", "cpu", "--seconds", "1", "--samples", "4", "--out", str(out), *SMALL, room]
        shown = CliRunner().invoke(app, ["profile", *options], catch_exceptions=False).output
        said.append("of the weight gradients" in " ".join(shown.split()))
        share = json.loads(out.read_text())["facts"]["postponed_without_room"]
        assert (share > 0) is said[-1]
    assert said == [True, False]


@pytest.mark.parametrize("captured", [0.0, 0.9])
def test_a_profile_of_a_gpu_knows_pads_and_gaps_where_its_steps_were_replayed(
    captured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = LoopTimes(*(Timing(fixed_ms=0.2),) * 3, [], [], pads=0.02 if captured else 0.0, captured=captured)
    copies = {f"{way}_gb_per_s": 50.0 for way in ("host_to_device", "device_to_host", "device_to_device")}
    beside = {"sm_kernel_slowdown": 1.1, "sm_free_slowdown": 1.0, "graph_cut_us": 4.0}
    on_cpu = torch.device("cpu")
    monkeypatch.setattr(measure, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        measure, "measure_steps", lambda config, device, **options: measure_steps(config, on_cpu, **options)
    )
    monkeypatch.setattr(measure, "measure_loop", lambda *args, **options: loop)
    monkeypatch.setattr(measure, "measure_gpu", lambda device: copies | beside)
    found = measure._measure_gpu(load_config(None, SMALL), torch.device("cuda"), 0.0, 2, lambda text: None)
    assert found.rates["pads"] == loop.pads
    assert ("graph_cut_us" in found.rates) is (captured > 0)
    assert found.times["host_hiding"] == loop.host


def test_where_memory_runs_out_less_is_kept_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, rooms, kept = 20_000, [2 << 30], []
    add = PostponedGradients.add

    def short(self: PostponedGradients, *args: Any, **options: Any) -> None:
        add(self, *args, **options)
        if self.most_bytes != rooms[-1]:
            rooms.append(self.most_bytes)
        if self.kept_bytes > fits:
            kept.append(self.kept_bytes)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("freescale.kernels.runtime.postponed._LEAST", 1)
    monkeypatch.setattr(PostponedGradients, "add", short)
    found = measure_steps(load_config(None, SMALL), torch.device("cpu"), seconds=0.0, most_samples=2)
    assert kept, "memory did run out"
    assert rooms[1:] == [size * 3 // 4 for size in kept], "three quarters of what was kept, not of the bound"
    assert len(found.steps["weights"]) == FEWEST_SHAPES
    assert found.num_without_room > 0


@pytest.mark.parametrize("device", ["tpu", "CPU", "cuda:1", ""])
def test_another_device_is_refused_before_anything_is_measured(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_steps", lambda *args, **options: pytest.fail("measured"))
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["profile", "--device", device], catch_exceptions=False)
    assert caught.value.got == device
    assert caught.value.allowed == "auto, cpu, cuda"
    assert "--device cpu" in (caught.value.next_step or "")


def test_the_spread_is_that_of_the_steps() -> None:
    rng = np.random.default_rng(0)
    times = {"forward": Timing(fixed_ms=2.0, per_token_ms=0.1), "backward": Timing(per_token_ms=0.2)}
    steps = [
        MeasuredStep(1, tokens, 0.0, (2 + 0.3 * tokens) * (1 + 0.03 * rng.standard_normal()))
        for tokens in range(50, 450)
    ]
    assert fits.spread(steps, times) == pytest.approx(0.03, rel=0.15)
    pauses = [*steps, *(MeasuredStep(1, 100, 0.0, 5000.0) for _ in range(20))]
    assert fits.spread(pauses, times) == pytest.approx(0.03, rel=0.2)


def test_shapes_are_of_many_sizes_and_lengths() -> None:
    lengths = np.concatenate([np.zeros(3, dtype=np.int64), np.arange(1, 400)])
    made = list(itertools.islice(shapes(lengths, most_samples=32, seed=1), 24))
    sizes = {len(rows) for rows in made}
    assert max(sizes) == 32
    assert min(sizes) <= 2
    assert len(sizes) >= 8
    means = [float(lengths[rows].mean()) for rows in made]
    assert max(means) > 4 * min(means)
    assert all((lengths[rows] > 0).all() for rows in made)


def test_only_what_grows_with_the_tokens_is_slower_beside_neighbours() -> None:
    times = {
        "forward": Timing(fixed_ms=1.0, per_token_ms=0.1, per_square_ms=0.01),
        "backward": Timing(fixed_ms=2.0, per_sample_ms=0.5, per_token_ms=0.2, per_square_ms=0.02),
        "update": Timing(per_token_ms=1.0),
    }

    def steps(factor: float) -> list[MeasuredStep]:
        shapes = [(3, 100, 2000.0), (5, 300, 90_000.0), (1, 50, 2500.0)]
        return [MeasuredStep(n, t, s, 3 + 0.5 * n + factor * 0.3 * t + 0.03 * s) for n, t, s in shapes]

    factor = fits.neighbours_slowdown(times, steps(1.5))
    assert factor == pytest.approx(1.5)
    slower = fits.beside_neighbours(times, factor)
    assert slower["backward"].per_token_ms == pytest.approx(0.3)
    assert slower["backward"].per_square_ms == 0.02
    assert slower["update"] == times["update"]
    # Faster than alone is noise, and no steps tell nothing.
    assert fits.neighbours_slowdown(times, steps(0.8)) == fits.neighbours_slowdown(times, []) == 1.0
    assert fits.beside_neighbours(times, 1.0) == times


def test_hiding_is_told_from_the_same_steps_alone() -> None:
    plain = [MeasuredStep(1, 10 * n, 100.0, ms=10.0) for n in range(1, 6)]
    hiding = [MeasuredStep(1, 10 * n, 100.0, ms=12.0) for n in (1, 2, 3)] + [MeasuredStep(1, 7, 1.0, ms=99.0)]
    assert fits.hiding_slowdown(InARun(plain, hiding)) == pytest.approx(1.2)
    assert fits.hiding_slowdown(InARun(plain, plain[1:])) == fits.hiding_slowdown(InARun()) == 1.0


@pytest.mark.slow  # in CI: one rank is measured (above), and ranks that share a GPU find each other (tests/comm/world)
@pytest.mark.timeout(300)
def test_ranks_that_share_a_device_are_measured_side_by_side(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", python)
    config = load_config(None, (*SMALL, "run.device=cpu"))
    found = measure_side_by_side(
        config,
        num_ranks=2,
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        seconds=0.1,
        most_samples=8,
    )
    # Every rank has measured its own shapes, and all of them count.
    assert len(found.steps.steps["forward"]) == 2 * FEWEST_SHAPES
    assert len({step.tokens for step in found.steps.steps["forward"]}) > FEWEST_SHAPES
    run = found.in_a_run
    assert len(run.plain) == len(run.hiding) == len(run.shortest) == 2 * 20
    assert all(step.ms > 0 for step in run.plain)
    assert 240 < sum(step.num_samples for step in run.plain) <= 2 * 8 * 20
    assert [step.tokens for step in run.plain] == [step.tokens for step in run.hiding]
    assert all(step.num_samples <= 2 for step in run.shortest)
    assert set(found.lines) == set(LINES)
    assert all(line.fixed_ms + line.per_token_ms > 0 for line in found.lines.values())
    assert {*RATES, "hiding_ms", "hiding_us_per_id"} == set(found.rates)
    assert all(value >= 0 for value in found.rates.values())
    assert found.rates["exchange_gb_per_s"] > 1e-4
    assert 0 < found.rates["control_us"] < 10e6


def profiled(rank: int) -> str:
    ranks = these_ranks()
    config = load_config(None, (*SMALL, "run.device=cpu"))
    return measure.measure_sharing_ranks(config, ranks, seconds=0.1, most_samples=8).to_json()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_run_already_measure_one_profile() -> None:
    first, second = (json.loads(text) for text in run_on_ranks(profiled, 2, timeout=250))
    for one in (first, second):
        one["facts"].pop("seconds")
        one["facts"].pop("load_average")
    assert first == second
    assert first["shared_by"] == 2
    assert first["facts"]["shapes"] == 2 * FEWEST_SHAPES
    assert set(LINES) <= set(first["times"])


def test_virtual_gpus_give_one_profile_that_knows_how_many_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def watched(config: Config, **options: Any) -> SideBySide:
        asked.update(options)
        return pretend(config, **options)

    @contextmanager
    def shared(num_ranks: int) -> Iterator[Shared]:
        yield Shared({"SHARE": str(num_ranks)}, True, "a GPU")

    monkeypatch.setattr(measure, "measure_side_by_side", watched)
    monkeypatch.setattr(measure, "virtual_gpus_of", shared)
    profile = measure.measure_profile(load_config(None, SMALL), most_samples=8, virtual_gpus=4)
    assert asked["environment"] == {"SHARE": "4"}
    assert profile.hardware == "cuda, shared by 4"
    # Alone 0.1 ms a token in forward and backward each; in a run, where all use the memory, 0.3 together.
    assert profile.times["forward"].per_token_ms == pytest.approx(0.15, rel=0.02)
    assert profile.times["backward"].per_token_ms == pytest.approx(0.15, rel=0.02)
    assert (profile.device, profile.shared_by, profile.has_links) == ("cuda", 4, True)
    assert {f"rates.{name}" for name in RATES} <= set(profile.measured)
    assert parse_profile(profile.to_json(), where="test") == profile


def test_no_virtual_gpu_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_steps", lambda *args, **options: pytest.fail("measured"))
    told = CliRunner().invoke(app, ["profile", "--virtual-gpus", "0"])
    assert told.exit_code == 2
    assert "--virtual-gpus" in told.output


@pytest.mark.parametrize("place", ["file/profile.json", "", "/proc/none/profile.json"])
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_measured(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out after minutes of measuring."""
    monkeypatch.setattr(profiling, "measure_profile", lambda *args, **options: pytest.fail("measured"))
    (tmp_path / "file").write_text("no folder")
    asked = ["profile", "--device", "cpu", "--out", str(tmp_path / place)]
    with pytest.raises(ConfigError, match=r"--out (cannot be written|names a folder)") as caught:
        CliRunner().invoke(app, asked, catch_exceptions=False)
    assert "profile.json" in str(caught.value.next_step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_gpu_that_is_not_there_is_told_by_the_option_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="--device cuda, but") as caught:
        measure.measure_profile(load_config(None, SMALL), device="cuda")
    assert str(caught.value.next_step).startswith("--device cpu")


def test_virtual_gpus_on_a_cpu_are_refused() -> None:
    with pytest.raises(TrainingError, match="--virtual-gpus 2 --device cpu"):
        measure.measure_profile(load_config(None, SMALL), device="cpu", virtual_gpus=2)


def test_models_with_features_are_measured_with_all_their_tables() -> None:
    from freescale.profiling.step_times import measure_steps
    from freescale.sim.command import setting_before_changes
    from freescale.sim.inputs.table_loads import read_tables

    keys = ("synthetic.features=true", "tables.home.dim=5")
    config = load_config(None, [*SMALL, *keys])
    found = measure_steps(config, torch.device("cpu"), seconds=0.0, most_samples=3)
    tables = {table.name: table for table in read_tables(found.tables)}
    assert set(tables) == {"item", "genre", "country", "hour", "home"}
    assert (tables["home"].rows, tables["home"].row_bytes) == (1000, 20)
    assert (tables["item"].ids_per_token, tables["item"].ids_per_sample) == (1, 4)
    assert (tables["country"].ids_per_token, tables["country"].ids_per_sample) == (0, 1)
    assert 20 < found.row_bytes <= 64
    assert all(len(steps) == FEWEST_SHAPES for steps in found.steps.values())
    assert min(step.ms for step in found.steps["update"]) > 0
    assert setting_before_changes(profile="h200", cluster="h100").workload.tables == ""
