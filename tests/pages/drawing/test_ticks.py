"""Ticks are round, enclose what is shown, and have labels that can be told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.pages.drawing.charts import Chart, Series, draw
from freescale.pages.drawing.ticks import (
    enclosing_ticks,
    nice_ticks,
    percent_labels,
    plain_labels,
    spread_ticks,
    step_ticks,
)


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(3.9, 8.1) == [4, 5, 6, 7, 8]
    assert nice_ticks(0, 0.31) == [0, 0.1, 0.2, 0.3]
    assert nice_ticks(5, 5) == [5]


def test_enclosing_ticks_end_beyond_the_curve() -> None:
    assert enclosing_ticks(3.9, 8.1) == [3, 4, 5, 6, 7, 8, 9]
    assert enclosing_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_whatever_the_range_it_is_enclosed_and_labels_differ(low: float, span: float) -> None:
    high = low + span
    ticks = enclosing_ticks(low, high)
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= high - 1e-6 * span
    assert 2 <= len(ticks) <= 8
    for labels in (plain_labels(ticks), percent_labels(ticks)):
        assert len(set(labels)) == len(ticks), labels


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([1.0, 1.00005, 1.0001], ["1.00000", "1.00005", "1.00010"]),
        ([0, 20_000, 40_000], ["0", "20k", "40k"]),
        ([0, 500, 1000, 1500], ["0", "500", "1,000", "1,500"]),
        ([0, 0.0002, 0.0004], ["0", "2e-4", "4e-4"]),
        ([-5, 0, 5], ["-5", "0", "5"]),
        ([0, 2.5e6], ["0", "2.5M"]),
    ],
)
def test_labels_of_an_axis_share_a_unit(ticks: list[float], labels: list[str]) -> None:
    assert plain_labels(ticks) == labels


def test_shares_are_percentages() -> None:
    assert percent_labels([0, 0.2, 0.4]) == ["0%", "20%", "40%"]
    assert percent_labels([0, 0.005, 0.01]) == ["0%", "0.5%", "1.0%"]


def test_the_last_step_is_a_tick_and_has_room() -> None:
    assert step_ticks(0, 192) == [0, 50, 100, 150, 192]
    assert step_ticks(0, 205) == [0, 50, 100, 150, 205]
    assert step_ticks(7, 7) == [7]


def test_values_that_were_tried_are_the_ticks_of_their_axis() -> None:
    assert spread_ticks([8, 64, 256], [0, 0.6, 1.0]) == [8, 64, 256]
    assert spread_ticks([1000, 1001, 2000], [0, 0.001, 1.0]) == [1001, 2000]


def test_a_logarithmic_axis_gives_equal_room_to_equal_factors() -> None:
    html = draw(Chart("c", [8, 64, 512], [Series("s", [1.0, 2.0, 3.0])], axis="GPUs", log=True))
    for place, label in (("0.00", "8"), ("50.00", "64"), ("100.00", "512")):
        assert f'left:{place}%">{label}<' in html
    assert "GPUs, logarithmic" in html
