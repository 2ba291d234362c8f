"""What a page says of rows on their way, and of the moment it stops hiding them."""

from __future__ import annotations

from pathlib import Path

from tests.pages.test_report import report_of, run_events, write_run


def events_with(plain: range, *, decided: list[dict[str, object]] | None = None) -> list[dict[str, object]]:
    """A run whose rows are split in all steps but those of `plain`."""
    events = run_events(80)
    for event in events:
        if event["event"] == "step":
            on = event["step"] not in plain
            event |= {"overlap": 0.25 * on, "parked_rows": 70 * on, "split_ms": 0.4 * on, "exposed_ms": 2.5}
            event["busiest_owner"] = 1.25
    return [*events[:-1], *(decided or []), events[-1]]


def decision(**values: object) -> dict[str, object]:
    usual = {
        "prioritized_ms": 163.7,
        "plain_ms": 150.2,
        "from_step": 45,
        "changed": True,
        "prioritized": False,
    }
    return {"event": "pipeline", "step": 40, **usual, **values}


def test_every_chart_has_a_caption(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", events_with(range(0))))
    for words in (
        "the share that the step before used, too",
        "Rows whose gradients the next step does not need",
        "Time to tell the rows that wait from those that need not",
        "Time a rank stood still for rows",
        "the busiest rank sends as their owner",
    ):
        assert words in page.text
    assert "Shaded" not in page.text


def test_the_moment_it_stops_is_shaded_and_explained(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", events_with(range(45, 81), decided=[decision()])))
    assert (
        "From step 45 on the run is plain, which was faster: 163.7 ms a step prioritized, 150.2 ms plain. "
        "Overlap, parked rows and split time end there." in page.text
    )
    assert page.text.count("Shaded: steps 45 to 80, the plain way, in which nothing is split.") == 3
    bands = [attrs for tag, attrs in page.tags if tag == "path" and attrs.get("class") == "band"]
    assert len(bands) == 3


def test_a_try_that_changed_nothing_is_told_as_one(tmp_path: Path) -> None:
    tried = decision(prioritized=True, changed=False, prioritized_ms=150.0, plain_ms=163.0)
    page = report_of(write_run(tmp_path / "demo", events_with(range(31, 41), decided=[tried])))
    assert (
        "Up to step 40 plain communication was tried: 150.0 ms a step prioritized, 163.0 ms plain."
        in page.text
    )
    assert "The run stays prioritized." in page.text
    assert "Shaded: steps 31 to 40" in page.text


def test_a_run_that_never_split_says_so(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", events_with(range(1, 81))))
    assert "Rows were not split in this run" in page.text


def test_of_many_decisions_the_last_are_told(tmp_path: Path) -> None:
    many = [decision(prioritized=True, changed=False) | {"step": step} for step in range(10, 80, 10)]
    page = report_of(write_run(tmp_path / "demo", events_with(range(31, 41), decided=many)))
    assert "2 earlier tries are not listed." in page.text
    assert "Up to step 20 " not in page.text
    assert "Up to step 30 " in page.text


def test_tables_have_a_panel_where_there_are_several(tmp_path: Path) -> None:
    events = run_events(40)
    for event in events:
        if event["event"] == "step":
            moved = {"rows": 30, "overlap": 0.5, "exposed_bytes": 1_500_000, "hidden_bytes": 0}
            event["tables"] = {"artist": moved, "item": {**moved, "exposed_bytes": 9_000_000, "rows": 1234}}
    events[0]["facts"] = {"tables": {"item": "1,000 x 16, hash", "artist": "90 x 16", "hour": "24 x 16"}}
    picture = {"event": "ids_artist", "step": 40, "occupancy": 0.25, "slots": 100}
    page = report_of(write_run(tmp_path / "demo", [*events, picture]))
    place = page.text.index("table unique rows overlap exposed rows taken what it is")
    text = page.text[place:]
    # That which moves most comes first.
    assert text.index("item 1,234 50.0% 9.00 MB - 1,000 x 16, hash") < text.index(
        "artist 30 50.0% 1.50 MB 25.0% 90 x 16"
    )
    assert "hour - - - - 24 x 16" in text


def test_one_table_has_no_panel(tmp_path: Path) -> None:
    page = report_of(write_run(tmp_path / "demo", run_events(40)))
    assert "unique rows" not in page.text
