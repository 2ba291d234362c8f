"""The cost model: what it predicts, what it learns from measured steps, and files it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from freescale.balance import CostModel, MeasuredStep, OnlineCostModel, fit_cost_model
from freescale.errors import DataError, PlanError

TRUE = CostModel(fixed_ms=3.0, per_sample_ms=0.02, per_token_ms=2e-3, per_square_ms=1e-6)


def measured(num_steps: int, *, noise: float = 0.0, pauses: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        lengths = np.minimum(np.exp(rng.normal(6.2, 1.0, rng.integers(1, 64))), 8192).astype(np.int64)
        ms = TRUE.fixed_ms + float(TRUE.cost(lengths).sum())
        ms *= max(0.5, rng.normal(1.0, noise))
        if rng.random() < pauses:
            ms *= rng.uniform(2, 20)
        steps.append(MeasuredStep.of(lengths, ms=ms))
    return steps


def test_cost_of_samples_and_of_a_batch_agree():
    lengths = np.array([0, 1, 100, 8192])
    (batch,) = TRUE.batches_ms(np.array([[4, lengths.sum(), (lengths.astype(float) ** 2).sum()]]))
    assert TRUE.cost(lengths).dtype == np.float64
    assert batch == pytest.approx(TRUE.fixed_ms + TRUE.cost(lengths).sum())


def test_default_has_attention_equal_to_linear_work_at_2048():
    model = CostModel.default()
    assert model.per_square_ms * 2048**2 == pytest.approx(model.per_token_ms * 2048)


def test_exact_times_give_exact_coefficients():
    fit = fit_cost_model(measured(60), hardware="H200", model="hstu")
    for name in ("fixed_ms", "per_sample_ms", "per_token_ms", "per_square_ms"):
        assert getattr(fit.model, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)
    assert fit.error < 1e-6
    assert (fit.model.hardware, fit.model.model, fit.num_outliers) == ("H200", "hstu", 0)


def test_noise_and_pauses_do_not_spoil_the_fit():
    fit = fit_cost_model(measured(120, noise=0.02, pauses=0.1, seed=1))
    assert 4 <= fit.num_outliers <= 25
    assert fit.error < 0.03
    lengths = np.array([500, 5000])
    np.testing.assert_allclose(fit.model.cost(lengths), TRUE.cost(lengths), rtol=0.15)
    assert fit.worst_error >= fit.error == fit.model.error


def test_coefficients_are_never_negative():
    rng = np.random.default_rng(3)
    steps = [
        MeasuredStep(num_samples=int(n), tokens=int(100 * n), squares=1e4 * n, ms=float(5 + n - 1e-4 * n**2))
        for n in rng.integers(1, 60, 40)
    ]
    model = fit_cost_model(steps).model
    assert min(model.fixed_ms, model.per_sample_ms, model.per_token_ms, model.per_square_ms) >= 0


@pytest.mark.parametrize(
    "steps",
    [
        measured(9),
        [MeasuredStep(1, 10, 100.0, 0.0)] * 20,
        [MeasuredStep(1, 10, 100.0, float("nan"))] * 20,
        [MeasuredStep(1, -10, 100.0, 1.0)] * 20,
    ],
)
def test_steps_that_say_nothing_are_refused(steps):
    with pytest.raises(DataError):
        fit_cost_model(steps)


def test_online_refit_learns_the_run_and_knows_its_error():
    online = OnlineCostModel(window=64)
    assert online.error is None
    assert online.refit() == CostModel.default()
    for step in measured(100, noise=0.01, seed=4):
        online.observe(num_samples=step.num_samples, tokens=step.tokens, squares=step.squares, ms=step.ms)
    assert len(online.recent_steps()) == 64
    before = online.error
    online.refit()
    assert before is not None
    assert online.error is not None
    assert online.error < 0.015 < before


def test_online_refit_on_alike_batches_stays_near_what_was_known():
    online = OnlineCostModel(TRUE)
    rng = np.random.default_rng(5)
    for _ in range(50):
        ms = 1.3 * TRUE.batches_ms(np.array([[32, 30_000, 5e7]]))[0] * rng.normal(1, 0.02)
        online.observe(num_samples=32, tokens=30_000, squares=5e7, ms=float(ms))
    online.observe(num_samples=0, tokens=0, squares=0.0, ms=1.0)
    online.observe(num_samples=3, tokens=10, squares=100.0, ms=float("nan"))
    assert len(online.recent_steps()) == 50
    refitted = online.refit()
    lengths = np.array([100, 1000, 8000])
    shape = refitted.cost(lengths) / TRUE.cost(lengths)
    np.testing.assert_allclose(shape, 1.3, rtol=0.15)


def test_save_and_load_round_trip(tmp_path):
    path = tmp_path / "costs" / "h200-hstu.json"
    model = fit_cost_model(measured(40, noise=0.01), hardware="NVIDIA H200", model="hstu").model
    model.save(path)
    assert CostModel.load(path) == model
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_token_ms": None}, "lacks per_token_ms"),
        ({"per_token_ms": "fast"}, "must be a number"),
        ({"per_token_ms": True}, "must be a number"),
        ({"per_token_ms": -1.0}, "not negative"),
        ({"per_token_ms": float("nan")}, "not negative"),
        ({"per_tokens_ms": 1.0}, "per_token_ms"),
        ({"hardware": 7}, "must be text"),
        ({"version": 99}, "version"),
        ({"format": "something"}, "not a cost model"),
        ({"per_token_ms": 0, "per_square_ms": 0, "per_sample_ms": 0}, "not usable"),
    ],
)
def test_bad_files_are_refused(tmp_path, change, message):
    path = tmp_path / "model.json"
    CostModel.default().save(path)
    document = json.loads(path.read_text())
    for key, value in change.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message):
        CostModel.load(path)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        CostModel.load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        CostModel.load(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(DataError, match="not a cost model"):
        CostModel.load(tmp_path / "list.json")


def test_impossible_coefficients_are_refused():
    with pytest.raises(PlanError, match="per_token_ms"):
        CostModel(fixed_ms=0, per_sample_ms=0, per_token_ms=-1, per_square_ms=0)
    with pytest.raises(PlanError, match="cost nothing"):
        CostModel(fixed_ms=5, per_sample_ms=0, per_token_ms=0, per_square_ms=0)
