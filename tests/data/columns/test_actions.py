"""Actions are numbers, truths, or words with a vocabulary that the manifest keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freescale.data.preparing.preparation import prepare
from freescale.errors import DataError
from tests.data.raw_forms import histories, write


def made(tmp_path: Path, actions: list[str]) -> Path:
    rows = "".join(f"1,{item},{item},{action}\n" for item, action in enumerate(actions))
    return write(tmp_path / "x.csv", "user,item,time,action\n" + rows)


@pytest.mark.parametrize("memory_mb", [512, 0.0001])
@pytest.mark.parametrize(
    ("actions", "numbers", "vocabulary"),
    [
        (
            ["buy", "click", "click", "cart", "click", "buy"],
            [1, 0, 0, 2, 0, 1],
            {"click": 0, "buy": 1, "cart": 2},
        ),
        (["b", "a", "a", "b"], [1, 0, 0, 1], {"a": 0, "b": 1}),
        (["TRUE", "false", "true"], [1, 0, 1], None),
        (["yes", "no", "yes"], [1, 0, 1], None),
        (["0", "1", "1"], [0, 1, 1], None),
        (["4.5", "-1", "1e1"], [4.5, -1, 10], None),
    ],
)
def test_kinds_of_actions(
    tmp_path: Path, actions: list[str], numbers: list[float], vocabulary: Any, memory_mb: float
) -> None:
    summary = prepare(made(tmp_path, actions), tmp_path / "out", memory_mb=memory_mb)
    assert histories(tmp_path / "out", "action") == {1: numbers}
    assert json.loads((tmp_path / "out" / "dataset.json").read_text()).get("actions") == vocabulary
    assert summary.actions == vocabulary


def test_numbers_as_the_user_gives_them(tmp_path: Path) -> None:
    source = made(tmp_path, ["buy", "click", "click", "5"])
    for actions, numbers in (
        (["5", "buy", "click"], [1, 2, 2, 0]),
        ({"buy": 3.5, "click": -1, "5": 0}, [3.5, -1, -1, 0]),
    ):
        prepare(source, tmp_path / "out", actions=actions, overwrite=True)
        assert histories(tmp_path / "out", "action") == {1: numbers}
    with pytest.raises(DataError, match="word of its own"):
        prepare(source, tmp_path / "other", actions=["buy", "buy"])


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["click", "click", "5"], r"line 4: the action.*'5'.*words such as click"),
        (["5", "4", "click"], r"line 4: the action.*'click'.*numbers.*--actions"),
        (["true", "false", "maybe"], r"line 4: the action.*'maybe'.*true or false"),
        (["click", "", "buy"], r"line 3: the action is missing"),
        (["click", "NULL", "buy"], r"line 3: the action is missing"),
        (["1", "inf", "2"], r"line 3: the action cannot be used.*'inf'"),
    ],
)
def test_actions_that_are_none(tmp_path: Path, actions: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepare(made(tmp_path, actions), tmp_path / "out")


def test_a_column_of_titles_is_no_column_of_actions(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)more than 256 different words.*--action ''"):
        prepare(made(tmp_path, [f"title {n}" for n in range(300)]), tmp_path / "out")
