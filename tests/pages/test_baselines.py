"""What no training reaches, beside the metrics of a run on its page."""

from __future__ import annotations

from freescale.pages.panels.run_charts import eval_charts
from freescale.pages.report import eval_table
from freescale.trace.metrics_log import MetricsLog


def test_both_baselines_stand_in_table_and_charts() -> None:
    values = {"hr@10": 0.2, "popularity_hr@10": 0.02, "repeat_last_hr@10": 0.15}
    log = MetricsLog(
        evals=[{"event": "eval", "step": 4, **values, "repeat_share": 0.3, "filter_seen": False}]
    )
    assert log.eval_metrics() == ["hr@10"]
    table = eval_table(log)
    assert table.index("popularity") < table.index("repeat last") < table.index("0.1500")
    (chart,) = eval_charts(log)
    assert [series.name for series in chart.series] == ["HR@10", "HR@10 popularity", "HR@10 repeat last"]
    assert "a user's own items again" in chart.note


def test_each_split_stands_above_its_own_baseline() -> None:
    """What popularity reaches of the validation targets stood below the test's row."""
    of_valid = {"event": "eval", "step": 4, "hr@10": 0.2, "popularity_hr@10": 0.0429}
    of_test = {"event": "eval", "step": 4, "split": "test", "hr@10": 0.11, "popularity_hr@10": 0.0369}
    table = eval_table(MetricsLog(evals=[of_valid], test=of_test))
    places = [
        table.index(text)
        for text in ("popularity, validation", "0.0429", "0.1100", "popularity, test", "0.0369")
    ]
    assert places == sorted(places)
