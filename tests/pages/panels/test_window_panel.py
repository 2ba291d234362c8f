"""The panel of windows tells what came with each, and how well it was foreseen."""

from __future__ import annotations

import json
from pathlib import Path

from freescale.pages import write_report
from freescale.pages.panels.window_panel import window_panel
from freescale.trace import MetricsLog, read_metrics

WINDOWS = [
    {"event": "window", "step": 4, "window": 0, "rows": 9, "events": 30, "targets": 21, "items": 10}
    | {"first": 0, "last": 86_399, "late": 0, "dropped": 0},
    {"event": "window", "step": 8, "window": 1, "rows": 8, "events": 20, "targets": 18, "items": 14}
    | {"first": 86_400, "last": 172_799, "late": 3, "dropped": 1},
]
TEST = {"event": "eval", "step": 4, "split": "next", "window": 1, "hr@10": 0.25, "targets": 18, "unknown": 9}


def _log(tmp_path: Path) -> MetricsLog:
    events = [{"event": "start", "total_steps": 8}, {"event": "step", "step": 1, "loss": 1.0}, TEST, *WINDOWS]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return read_metrics(tmp_path / "metrics.jsonl", growing=True)


def test_every_window_has_a_row(tmp_path: Path) -> None:
    log = _log(tmp_path)
    assert log.eval_metrics() == ["hr@10"]
    html = window_panel(log)
    for text in ("1970-01-01 23:59", "1970-01-02 23:59", "50.0%", "0.2500", "30", "21", "18"):
        assert f">{text}<" in html, text
    assert ">10<" in html  # new items
    assert ">4<" in html
    write_report(tmp_path)
    assert "Windows" in (tmp_path / "report.html").read_text()


def test_a_run_without_a_log_has_no_panel() -> None:
    assert window_panel(MetricsLog()) == ""
