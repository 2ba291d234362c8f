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
