"""The command line says what it took for what, and so does a run that prepares a raw file on its way."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.app.run.train_run import build_source_together
from freescale.errors import DataError
from freescale.recipe import load_config
from tests.small_run import SMALL, these_ranks

ROWS = "".join(
    f"{n % 5},{n % 7},{['view', 'buy'][n % 3 == 0]},2024-01-{1 + n % 28:02d},x\n" for n in range(60)
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_prepare_prints_what_it_took_and_what_it_ignored(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("user_id,item_id,event,created_at,price\n" + ROWS + "1,2,view,,3\n")
    options = ["--time", "created_at", "--action", "event", "--bad-lines", "skip"]
    said = run("prepare", str(source), str(tmp_path / "out"), *options)
    for told in (
        "user: user_id",
        "item: item_id",
        "time: created_at (dates, those without a time zone in UTC; from 2024-01-01 to 2024-01-28)",
        "action: event (words, numbered by frequency: view 0, buy 1)",
        "ignored: price",
        "skipped 1 bad line",
        "line 62: the time is missing",
    ):
        assert told in said
    said = run(
        "prepare",
        str(source),
        str(tmp_path / "no"),
        "--time",
        "",
        "--action",
        "event",
        "--actions",
        "buy,view",
    )
    assert "time: none, events keep the order of the input" in said
    assert "numbered as asked for: buy 0, view 1" in said
    with pytest.raises(DataError, match="The numbers of the actions"):
        app(["prepare", str(source), str(tmp_path / "n2"), "--actions", "buy=x"], standalone_mode=False)


def test_headerless_text_on_the_command_line(tmp_path: Path) -> None:
    source = tmp_path / "x.dat"
    source.write_text(ROWS)
    said = run("prepare", str(source), str(tmp_path / "out"), "--columns", "user,item,action,time,_")
    assert "read as csv: the names of its columns were given" in said
    assert "ignored" not in said


def test_a_run_on_a_raw_file_says_it_too_and_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "x.csv"
    source.write_text("user_id,item_id,event,timestamp,price\n" + ROWS)
    config = load_config(None, [*SMALL, f"data.path={source}", f"run.out={tmp_path / 'run'}"])
    build_source_together(config, these_ranks())
    said = capsys.readouterr().out
    assert "time: timestamp (dates" in said
    assert "ignored: event, price" in said
    build_source_together(config, these_ranks())
    assert capsys.readouterr().out == ""
