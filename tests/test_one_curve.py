"""The promise: however many ranks, however balanced, killed or not, it is one curve."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.recipe import assembly
from tests.effort import slow
from tests.padded_runs import padded_capture
from tests.ranks import run_on_ranks
from tests.small_run import train_small

FLOAT64 = ("model.dtype=float64",)


def on_ranks(
    num_ranks: int, recipe: tuple[str, ...], folder: str | None = None, resume_from: Path | None = None
) -> dict[str, Any]:
    """Rank 0's results; all ranks must have the same tensors."""
    if num_ranks == 1:
        return train_small(recipe, folder, resume_from=resume_from)
    folder = folder or tempfile.mkdtemp()
    results = run_on_ranks(_train, num_ranks, recipe, folder, resume_from, timeout=110)
    for other in results[1:]:
        for name, value in results[0]["tensors"].items():
            np.testing.assert_array_equal(value, other["tensors"][name])
    return results[0]


def _train(rank: int, recipe: tuple[str, ...], folder: str, resume_from: Path | None) -> Any:
    return train_small(recipe, folder, resume_from=resume_from)


@pytest.fixture(scope="module", params=[12, slow(200)])
def steps(request: pytest.FixtureRequest) -> int:
    """Curves that part at all part in their first steps: a few in CI, the long ones where minutes are given."""
    return request.param


@pytest.fixture(scope="module")
def curve(steps: int) -> tuple[str, ...]:
    return (*FLOAT64, f"run.steps={steps}", f"run.eval_every={steps // 2}")


@pytest.fixture(scope="module")
def alone(curve: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, curve)


@pytest.fixture(scope="module", params=[8, slow(40)])
def short(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """For what needs a reference of its own."""
    return (*FLOAT64, f"run.steps={request.param}", f"run.eval_every={request.param}")


@pytest.fixture(scope="module")
def short_alone(short: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, short)


DECODER = ("model.kind=llama", "model.heads=2", "model.kv_heads=1", "model.dropout=0.2")


@pytest.fixture(scope="module")
def decoder_alone(short: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, (*short, *DECODER))


def assert_same_curve(ours: dict[str, Any], reference: dict[str, Any], first_step: int = 0) -> None:
    np.testing.assert_allclose(ours["losses"], reference["losses"][first_step:], rtol=1e-9)
    for name, value in reference["tensors"].items():
        np.testing.assert_allclose(ours["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)
    for a, b in zip(ours["evals"][::-1], reference["evals"][::-1]):
        assert {k: v for k, v in a.items() if "@" in k} == pytest.approx(
            {k: v for k, v in b.items() if "@" in k}
        )


def assert_goes_on_with_other_ranks(
    recipe: tuple[str, ...], folder: Path, alone: dict[str, Any], *, part: int, ranks: tuple[int, ...]
) -> None:
    """Each number of ranks goes on from the checkpoint of the one before, for a part of the curve of one alone."""
    for step, num_ranks in zip(range(0, len(ranks) * part, part), ranks, strict=True):
        until = step + part
        path = folder / "checkpoints" / f"step-{step:08d}" if step else None
        result = on_ranks(num_ranks, (*recipe, f"run.steps={until}"), str(folder), path)
        np.testing.assert_allclose(result["losses"], alone["losses"][step:until], rtol=1e-9)
    for name, value in alone["tensors"].items():
        np.testing.assert_allclose(result["tensors"][name], value, rtol=0, atol=1e-8, err_msg=name)


def test_the_curve_goes_down() -> None:
    alone = on_ranks(1, (*FLOAT64, "run.steps=120", "run.eval_every=0"))
    assert np.mean(alone["losses"][-10:]) < 0.75 * np.mean(alone["losses"][:10])


@pytest.mark.parametrize(
    ("num_ranks", "change"),
    [
        (1, "data.workers=2"),
        (2, "optim.clip_norm=1e9 optim.accumulate=2"),
        pytest.param(4, "pipeline.prioritized=false", marks=pytest.mark.slow),
    ],
)
def test_padded_batches_do_not_change_the_curve(
    num_ranks: int,
    change: str,
    curve: tuple[str, ...],
    alone: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As captured steps on GPUs take them; gradients are added up outside of any backward then."""
    monkeypatch.setattr(assembly, "build_capture", padded_capture)
    assert_same_curve(on_ranks(num_ranks, (*curve, *change.split())), alone)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_do_not_change_the_curve(num_ranks: int, curve: tuple[str, ...], alone: dict[str, Any]) -> None:
    assert_same_curve(on_ranks(num_ranks, curve), alone)


@pytest.mark.parametrize(
    "change",
    [
        "balance.enabled=false optim.accumulate=3",
        "embedding.replicate_below_mb=100",
        "data.workers=1 pipeline.postpone=on",
        *(slow(each) for each in ("balance.enabled=false", "optim.accumulate=3", "data.workers=1")),
        slow("pipeline.postpone=on"),
    ],
)
def test_speed_features_do_not_change_the_curve(
    change: str, curve: tuple[str, ...], alone: dict[str, Any]
) -> None:
    assert_same_curve(on_ranks(2, (*curve, *change.split())), alone)


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_rows_through_shared_memory_keep_the_curve_and_the_bits(
    num_ranks: int, short: tuple[str, ...], short_alone: dict[str, Any]
) -> None:
    staged = on_ranks(num_ranks, (*short, "comm.transport=host_staged"))
    assert_same_curve(staged, short_alone)
    plain = on_ranks(num_ranks, (*short, "comm.transport=host_staged", "pipeline.prioritized=false"))
    assert plain["losses"] == staged["losses"]
    for name, value in plain["tensors"].items():
        np.testing.assert_array_equal(staged["tensors"][name], value, err_msg=name)


@pytest.mark.parametrize(
    "optimizer", [slow("sgd"), "rowwise_adagrad"]
)  # several at once: test_one_curve_features
def test_every_table_optimizer_keeps_the_curve(optimizer: str, short: tuple[str, ...]) -> None:
    recipe = (*short, f"embedding.optimizer={optimizer}", "embedding.lr=0.05")
    assert_same_curve(on_ranks(2, recipe), on_ranks(1, recipe))


def test_clipping_schedules_and_sasrec_keep_the_curve(short: tuple[str, ...]) -> None:
    recipe = (*short, "optim.clip_norm=0.1", "optim.schedule=cosine")
    recipe += ("optim.warmup_steps=10", "model.kind=sasrec", "model.dropout=0.2")
    assert_same_curve(on_ranks(2, recipe), on_ranks(1, recipe))


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_a_decoder_with_shared_heads_keeps_the_curve(
    num_ranks: int, short: tuple[str, ...], decoder_alone: dict[str, Any]
) -> None:
    assert_same_curve(on_ranks(num_ranks, (*short, *DECODER)), decoder_alone)


@pytest.mark.parametrize(
    "batches", [("balance.window=4",), ("data.global_tokens=500",)], ids=["window", "token budget"]
)
@pytest.mark.parametrize("balanced", ["true", slow("false")])
def test_other_global_batches_keep_their_own_curve(
    balanced: str, batches: tuple[str, ...], short: tuple[str, ...]
) -> None:
    recipe = (*short, *batches)
    assert_same_curve(on_ranks(2, (*recipe, f"balance.enabled={balanced}")), on_ranks(1, recipe))


@pytest.mark.parametrize(("num_ranks", "steps"), [(2, 20), slow(2, 50), slow(4, 50)])
def test_float32_stays_close(num_ranks: int, steps: int) -> None:
    recipe = (f"run.steps={steps}", "run.eval_every=0")
    reference = on_ranks(1, recipe)["losses"]
    np.testing.assert_allclose(on_ranks(num_ranks, recipe)["losses"], reference, rtol=1e-4)


def test_more_ranks_than_samples() -> None:
    recipe = (*FLOAT64, "run.steps=5", "data.global_batch=2")
    assert_same_curve(on_ranks(3, recipe), on_ranks(1, recipe))


def test_a_checkpoint_of_four_ranks_goes_on_with_two_three_and_one(
    tmp_path: Path, steps: int, alone: dict[str, Any]
) -> None:
    # Never evaluated, and so never back at a best state: the last one is compared.
    recipe = (*FLOAT64, "run.eval_every=0", "run.keep=10")
    assert_goes_on_with_other_ranks(recipe, tmp_path, alone, part=steps // 4, ranks=(4, 2, 3, 1))


TEMPORAL = ("data.split=temporal", "data.valid_from=0.6", "data.test_from=0.8")


def test_a_temporal_split_keeps_its_own_curve_on_ranks_and_resumed(
    tmp_path: Path, short: tuple[str, ...]
) -> None:
    recipe = (*short, *TEMPORAL, "run.keep=10", "run.eval_every=4")
    reference = on_ranks(1, recipe, str(tmp_path))
    resumed = on_ranks(2, recipe, str(tmp_path), tmp_path / "checkpoints" / "step-00000004")
    assert_same_curve(resumed, reference, first_step=4)


DROPPING = ("model.dropout=0.2", "model.layers=2")


@pytest.fixture(scope="module")
def dropping_alone(short: tuple[str, ...]) -> dict[str, Any]:
    return on_ranks(1, (*short, *DROPPING))


def test_dropout_is_part_of_the_curve(short: tuple[str, ...], dropping_alone: dict[str, Any]) -> None:
    without = on_ranks(1, (*short, *DROPPING, "model.dropout=0"))
    assert not np.allclose(without["losses"], dropping_alone["losses"], rtol=1e-6)


@pytest.mark.parametrize("num_ranks", [slow(2), slow(4)])  # two: below
def test_ranks_do_not_change_the_curve_with_dropout(
    num_ranks: int, short: tuple[str, ...], dropping_alone: dict[str, Any]
) -> None:
    assert_same_curve(on_ranks(num_ranks, (*short, *DROPPING)), dropping_alone)


@pytest.mark.parametrize(
    ("num_ranks", "change"),
    [
        slow(1, "optim.accumulate=4"),
        (2, "optim.accumulate=4"),
        slow(2, "balance.enabled=false"),
        slow(2, "data.workers=1"),
    ],
)
def test_speed_features_do_not_change_the_curve_with_dropout(
    num_ranks: int, change: str, short: tuple[str, ...], dropping_alone: dict[str, Any]
) -> None:
    assert_same_curve(on_ranks(num_ranks, (*short, *DROPPING, change)), dropping_alone)


def test_a_run_with_dropout_goes_on_with_other_ranks_on_its_curve(
    tmp_path: Path, short: tuple[str, ...], dropping_alone: dict[str, Any]
) -> None:
    recipe = (*short, *DROPPING, "run.keep=10", "run.checkpoint_every=4")
    assert_same_curve(on_ranks(2, recipe, str(tmp_path)), dropping_alone)
    resumed = on_ranks(1, recipe, str(tmp_path), tmp_path / "checkpoints" / "step-00000004")
    assert_same_curve(resumed, dropping_alone, first_step=4)
