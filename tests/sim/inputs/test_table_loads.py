"""Several tables of a workload: read, written, and added up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.errors import ConfigError
from freescale.sim.answers.keys import changed, known_keys, value_of
from freescale.sim.answers.sensitivity import influences
from freescale.sim.command import setting_before_changes
from freescale.sim.costs.moved_rows import moved_rows
from freescale.sim.costs.plans import Loads
from freescale.sim.costs.setting import Features
from freescale.sim.inputs.table_loads import TableLoad, read_tables, write_tables
from freescale.sim.inputs.workload import Workload
from tests.effort import examples

NUMBER = st.floats(0, 1000).map(lambda value: round(value, 2))
TABLES = st.lists(
    st.builds(
        TableLoad,
        st.text("abcxyz_0", min_size=1, max_size=8),
        st.integers(1, 10**9),
        st.integers(1, 10**5),
        NUMBER,
        NUMBER,
        st.none() | st.floats(0, 2).map(lambda value: round(value, 3)),
    ),
    unique_by=lambda table: table.name,
    max_size=4,
)


@examples(40, 400)
@given(TABLES)
def test_what_is_written_is_read(tables: list[TableLoad]) -> None:
    assert list(read_tables(write_tables(tables))) == tables


@pytest.mark.parametrize(
    "text",
    ["item", "item:1,2,3", "item:1,2,3,4,5,6", "item:0,8,1,1", "item:a,8,1,1", ":1,8,1,1", "item:9,8,1,-1"],
)
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="NAME:ROWS,BYTES"):
        read_tables(text)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tables are called 'a'"):
        read_tables("a:1,1,1,1;a:2,2,2,2")


def loads() -> Loads:
    tokens = np.array([[400.0, 800.0]])
    return Loads(
        samples=np.array([[4.0, 4.0]]), tokens=tokens, squares=tokens**2, bound=0.0, planned=0.0, reason=""
    )


def test_tables_add_up_and_one_is_as_without_a_list() -> None:
    one = moved_rows(Workload(table_rows=5000, row_bytes=64, ids_per_sample=8), loads(), dedup=True)
    same = moved_rows(Workload(tables="item:5000,64,1,8"), loads(), dedup=True)
    both = moved_rows(Workload(tables="item:5000,64,1,8;b:300,16,0,2,0"), loads(), dedup=True)
    alone = moved_rows(Workload(tables="b:300,16,0,2,0"), loads(), dedup=True)
    for name in ("asked", "moved", "shared", "moved_bytes", "shared_bytes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
        np.testing.assert_allclose(getattr(both, name), getattr(one, name) + getattr(alone, name))
    np.testing.assert_allclose(alone.moved_bytes, 16 * alone.moved)
    every = moved_rows(Workload(tables="item:5000,64,1,8;b:300,16,0,2,0"), loads(), dedup=False)
    np.testing.assert_array_equal(every.moved, every.asked)


def test_numbers_of_one_table_do_not_go_with_a_list() -> None:
    setting, features = setting_before_changes(profile="h200", cluster="h100"), Features()
    assert "workload.tables" in known_keys()
    setting, features = changed(setting, features, "workload.tables", "item:1000,64,1,0;b:50,8,1,0")
    assert "2 tables of 1,050 rows" in setting.workload.words()
    with pytest.raises(ConfigError, match="says it for every table"):
        changed(setting, features, "workload.row_bytes", "128")
    back, _ = changed(setting, features, "workload.tables", "")
    assert changed(back, features, "workload.row_bytes", "128")[0].workload.row_bytes == 128
    with pytest.raises(ConfigError, match="NAME:ROWS"):
        changed(setting, features, "workload.tables", "item")
    assert value_of(setting, features, "workload.tables").startswith("item:")
    told = influences(
        setting, features, num_ranks=2, keys=("workload.row_bytes", "workload.zipf"), num_steps=4
    )
    assert [each.key for each in told] == ["workload.zipf"]
