"""Lines of a terminal about tasks."""

from __future__ import annotations

from freescale.train.log.task_lines import task_rows


def test_a_row_a_task_with_the_numbers_people_look_at() -> None:
    metrics = {
        "auc/like": 0.75,
        "calibration_3/like": 1.5,
        "ne/like": 0.9,
        "auc/love": None,
        "mse/stars": 1.25,
    }
    assert task_rows("test", metrics) == {"test like": "auc 0.7500  ne 0.9000", "test stars": "mse 1.2500"}
    assert task_rows("test", {"hr@10": 0.3}) is None
    assert task_rows("test", None) is None
