"""Lines that cannot be used stop `prepare`, or are skipped, counted and shown; never silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from freescale.data.preparing.preparation import prepare
from freescale.errors import DataError
from tests.data.raw_forms import histories, write

HEADER = "user,item,time\n"


@pytest.mark.parametrize("memory_mb", [512, 0.0001])
def test_all_are_counted_and_five_are_shown(tmp_path: Path, memory_mb: float) -> None:
    good = [f"1,{n},{n}\n" for n in range(40)]
    bad = {
        3: "1,,3\n",
        9: "1,2\n",
        20: "1,5,soon\n",
        21: "1,5,\n",
        30: ",5,5\n",
        31: "1,5,5,5\n",
        39: "1,nan,1\n",
    }
    lines = "".join(bad.get(n, "") + line for n, line in enumerate(good))
    source = write(tmp_path / "x.csv", HEADER + lines)
    summary = prepare(source, tmp_path / "out", bad_lines="skip", memory_mb=memory_mb)
    assert histories(tmp_path / "out") == {1: list(range(40))}
    assert summary.num_skipped == 7
    said = [line for line in summary.taken if "x.csv, line" in line]
    assert len(said) == 5
    assert "skipped 7 bad lines" in summary.taken
    numbers = dict(zip(bad, (5, 12, 24, 26, 36, 38, 47)))
    for line in said:
        place = int(line.split("line ")[1].split(":")[0])
        assert place in numbers.values()
        assert (HEADER + lines).split("\n")[place - 1] + "\n" in bad.values()


def test_ids_of_another_kind_than_asked_for_are_bad_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "user,item\n1,2\n1,x\n1,3\n1,4\n")
    kinds = {"item": "int64"}
    summary = prepare(source, tmp_path / "out", bad_lines="skip", id_kinds=kinds)
    assert histories(tmp_path / "out") == {1: [2, 3, 4]}
    assert "line 3" in "\n".join(summary.taken)
    with pytest.raises(DataError, match="line 3"):
        prepare(source, tmp_path / "other", id_kinds=kinds)


def test_skipping_is_for_a_few_lines(tmp_path: Path) -> None:
    rows = "".join(f"1,{n},{n}\n1,{n},never\n1,{n},\n" for n in range(900))
    source = write(tmp_path / "x.csv", HEADER + rows)
    with pytest.raises(DataError, match=r"(?s)More than half.*1,800 of 2,700.*line 3.*name other columns"):
        prepare(source, tmp_path / "out", bad_lines="skip")


def test_nothing_but_bad_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", HEADER + "1,2,\n1,3,\n")
    with pytest.raises(DataError, match=r"(?s)no events: all 2 lines.*line 2: the time is missing"):
        prepare(source, tmp_path / "out", bad_lines="skip")
    with pytest.raises(DataError, match="stop, skip"):
        prepare(source, tmp_path / "out", bad_lines="ignore")


def test_a_quote_that_is_never_closed_hides_no_lines(tmp_path: Path) -> None:
    rows = "".join(f"1,{n},{n},fine\n" for n in range(4)) + '1,4,4,"open\n1,5,5,fine\n'
    source = write(tmp_path / "x.csv", "user,item,time,note\n" + rows)
    with pytest.raises(DataError, match="line 6: a quote is never closed"):
        prepare(source, tmp_path / "out", bad_lines="skip")
