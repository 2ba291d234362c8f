"""The panel of published versions: sizes, times, and how old new items are when they are first recommended."""

from __future__ import annotations

import json
from pathlib import Path

from freescale.pages import write_report
from freescale.pages.panels.version_panel import version_charts, version_panel
from freescale.trace import PUBLISHED_FILE, note_published, read_published

DAY = 86_400
BASE = {"chain": "/c", "seq": 0, "step": 4, "windows": 1, "num_bytes": 4 << 20, "seconds": 0.5}
BASE |= {"num_items": 90, "changed": 90, "deleted": 0, "fresh": []}
DELTA = {"chain": "/c", "seq": 1, "step": 8, "windows": 2, "num_bytes": 1 << 20, "seconds": 0.25}
DELTA |= {"num_items": 95, "changed": 31, "deleted": 7, "fresh": [[5, DAY], [6, 3 * DAY], [7, 9 * DAY]]}


def test_every_version_has_a_row_with_its_size_and_the_age_of_new_items(tmp_path: Path) -> None:
    note_published(tmp_path, BASE)
    note_published(tmp_path, DELTA)
    published = read_published(tmp_path)
    html = version_panel(published)
    for text in ("4.000 MiB", "1.000 MiB", "0.25 s", "31", "7", "3 d", "9 d"):
        assert f">{text}<" in html, text
    assert "3 new items have been recommended so far, the first time at a median age of 3 d" in html
    size, seconds, age = version_charts(published)
    assert list(size.series[0].values) == [None, 1.0]
    assert list(seconds.series[0].values) == [0.5, 0.25]
    assert list(age.series[0].values) == [None, 3.0]
    events = [{"event": "start", "total_steps": 8}, {"event": "step", "step": 1, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_report(tmp_path)
    assert "Published versions" in (tmp_path / "report.html").read_text()


def test_half_a_line_and_other_chains_do_no_harm(tmp_path: Path) -> None:
    assert read_published(tmp_path) == []
    assert version_panel([]) == ""
    assert version_charts([]) == []
    note_published(tmp_path, {**BASE, "chain": "/other", "seq": 3})
    note_published(tmp_path, BASE)
    with (tmp_path / PUBLISHED_FILE).open("a") as file:
        file.write('{"event": "publ')
    note_published(tmp_path, DELTA)
    note_published(tmp_path, {**DELTA, "step": 9})  # published again after a crash
    assert [(event["seq"], event["step"]) for event in read_published(tmp_path)] == [(0, 4), (1, 9)]
    assert [event["seq"] for event in read_published(tmp_path, chain="/other")] == [3]
