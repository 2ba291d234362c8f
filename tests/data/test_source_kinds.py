"""The data set of a recipe: made up, prepared, raw, or of a kind from outside that is checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.data import ParquetSource, SyntheticOptions, SyntheticSource, open_source, prepare, source_kind
from freescale.errors import ConfigError, DataError
from freescale.registry import register
from tests.data.raw_forms import lines, write
from tests.list_source import ListSource

RAW = lines("{user} {item}") * 2


pytestmark = pytest.mark.usefixtures("own_kinds")


@dataclass(frozen=True, kw_only=True)
class CountingOptions:
    rows: int = 3


class Counting(ListSource):
    """History r counts up from r + seed."""

    name = "counting"


def register_counting() -> None:
    @register("source", "counting", options=CountingOptions)
    def make(path: str, options: CountingOptions, *, seed: int) -> Counting:
        assert path == "anywhere"
        return Counting([[row + seed + n for n in range(5)] for row in range(options.rows)])


def test_auto_makes_up_or_reads_or_prepares_first(tmp_path: Path) -> None:
    made_up = open_source("synthetic", options=SyntheticOptions(users=20), seed=5)
    assert isinstance(made_up, SyntheticSource)
    assert (made_up.lengths == SyntheticSource(num_users=20, seed=5).lengths).all()
    raw = write(tmp_path / "x.txt", RAW)
    with pytest.raises(DataError, match="not a prepared folder"):
        open_source(raw)
    first = open_source(raw, cache=tmp_path / "cache")
    again = open_source(raw, cache=tmp_path / "cache")
    raw.write_text("0 0\n")
    as_it_was = open_source(raw, cache=tmp_path / "cache", on_change="keep")
    for source in (first, again, as_it_was, open_source(tmp_path / "cache")):
        assert isinstance(source, ParquetSource)
        assert source.lengths.tolist() == [6, 6]
    with pytest.raises(DataError, match=r"was prepared from .* other input"):
        open_source(raw, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"data\.path does not exist"):
        open_source(tmp_path / "nowhere")


def test_a_kind_by_name_and_the_nearest_one() -> None:
    register_counting()
    assert source_kind("synthetic").name == "synthetic"
    assert source_kind("data/x").name == "parquet"
    assert source_kind("anywhere", "counting").options is CountingOptions
    assert len(open_source("synthetic", kind="synthetic", options=SyntheticOptions(users=7)).lengths) == 7
    with pytest.raises(ConfigError, match=r"(?s)data\.source: there is no source 'countin'.*'counting'"):
        open_source("anywhere", kind="countin")
    with pytest.raises(DataError, match="read from nowhere"):
        open_source("elsewhere", kind="synthetic")


def test_a_source_from_outside_is_made_with_its_options_and_the_seed() -> None:
    register_counting()
    source = open_source("anywhere", kind="counting", seed=10)
    assert source.read([2]).columns["item"].tolist() == [12, 13, 14, 15, 16]
    assert len(open_source("anywhere", kind="counting", options=CountingOptions(rows=9)).lengths) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": []}, "no histories"),
        ({"histories": [[1, 2, 3]]}, "too short"),
        ({"groups": np.array([7])}, "do not add up"),
        ({"lengths": np.array([5.0, 5.0])}, "cannot be read by row"),
        ({"features": ("time",)}, "cannot be read by row"),
        ({"items": None}, "without items"),
    ],
)
def test_a_source_from_outside_is_checked(change: dict[str, Any], message: str) -> None:
    members = {name: value for name, value in change.items() if name in ("groups", "lengths")}
    base = type("Odd", (ListSource,), members)

    @register("source", "odd")
    def make(path: str, options: None, *, seed: int) -> Any:
        assert options is None
        source = base(change.get("histories", [[1, 2, 3, 4, 5]] * 2), change.get("features", ("item",)))
        return NoItems(source) if "items" in change else source

    with pytest.raises(DataError, match=message):
        open_source("x", kind="odd")


class NoItems:
    def __init__(self, source: ListSource) -> None:
        self.name, self.features = source.name, source.features
        self.lengths, self.groups, self.read = source.lengths, source.groups, source.read


def test_prepared_folders_are_read_the_same_for_every_seed(tmp_path: Path) -> None:
    prepare(write(tmp_path / "x.txt", RAW), tmp_path / "set")
    one, other = (open_source(tmp_path / "set", seed=seed).read([0, 1]) for seed in (0, 1))
    assert one.columns["item"].tolist() == other.columns["item"].tolist()
