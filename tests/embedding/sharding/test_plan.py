"""The plan of tables: blocks cover the rows once, like torch's own sharding, and the printed numbers add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.sharding.plan import TablePlan, TableSpec, plan_rows, plan_tables
from freescale.errors import PlanError

MIB = 1 << 20


def spec(num_rows=100, dim=8, optimizer=None, dtype=torch.float32, name="item"):
    return TableSpec(name=name, num_rows=num_rows, dim=dim, optimizer=optimizer or SGD(), dtype=dtype)


@settings(deadline=None)
@given(num_rows=st.integers(1, 500), num_ranks=st.integers(1, 40))
def test_blocks_cover_every_row_once_as_torch_cuts_them(num_rows, num_ranks):
    plan = TablePlan(spec=spec(num_rows), num_ranks=num_ranks, replicated=False)
    blocks = [plan.block(rank) for rank in range(num_ranks)]
    assert [row for first, count in blocks for row in range(first, first + count)] == list(range(num_rows))
    chunks = torch.arange(num_rows).chunk(num_ranks)
    assert [count for _, count in blocks if count] == [len(chunk) for chunk in chunks]
    assert plan.edges() == [*(first for first, _ in blocks), num_rows]


@settings(deadline=None)
@given(groups=st.integers(1, 60), size=st.integers(2, 9), num_ranks=st.integers(1, 40))
def test_rows_of_a_group_stay_together(groups, size, num_ranks):
    table = TableSpec(name="item", num_rows=groups * size, row_group=size, dim=2, optimizer=SGD())
    plan = TablePlan(spec=table, num_ranks=num_ranks, replicated=False)
    blocks = [plan.block(rank) for rank in range(num_ranks)]
    chunks = torch.arange(groups).chunk(num_ranks)
    assert [count for _, count in blocks if count] == [len(chunk) * size for chunk in chunks]
    assert plan.edges() == [*(first for first, _ in blocks), groups * size]
    (planned,) = plan_tables([table], num_ranks=num_ranks, replicate_below_mb=1e6)
    assert planned.replicated == (num_ranks == 1)


@settings(deadline=None)
@given(num_rows=st.integers(1, 500), num_ranks=st.integers(1, 40))
def test_every_rank_holds_all_of_a_replicated_table(num_rows, num_ranks):
    plan = TablePlan(spec=spec(num_rows), num_ranks=num_ranks, replicated=True)
    assert {plan.block(rank) for rank in range(num_ranks)} == {(0, num_rows)}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "wanted"),
    [
        (SGD(), torch.float32, 8 * 4),
        (SGD(), torch.bfloat16, 8 * 2),
        (RowwiseAdagrad(), torch.float32, 8 * 4 + 4),
        (RowwiseAdagrad(), torch.float64, 8 * 8 + 8),
        (Adam(), torch.float32, 3 * 8 * 4),
        (Adam(), torch.bfloat16, 8 * 2 + 2 * 8 * 4),
    ],
)
def test_bytes_per_row_count_weight_and_state(optimizer, dtype, wanted):
    assert spec(optimizer=optimizer, dtype=dtype).bytes_per_row == wanted


def test_tables_under_the_limit_are_replicated_and_larger_ones_sharded():
    small, large = spec(1000, 256, name="small"), spec(1100, 256, name="large")
    plans = plan_tables([small, large], num_ranks=4, replicate_below_mb=1.0)
    assert [plan.replicated for plan in plans] == [True, False]
    assert not any(plan.replicated for plan in plan_tables([small, large], num_ranks=4))
    assert all(plan.replicated for plan in plan_tables([small, large], num_ranks=1))


def test_memory_falls_with_the_number_of_ranks():
    for num_ranks in (1, 2, 4):
        (plan,) = plan_tables([spec(4096, 64, Adam())], num_ranks=num_ranks)
        per_rank = [plan.memory_mib(rank) for rank in range(num_ranks)]
        assert per_rank == [4096 * 64 * 4 * 3 / MIB / num_ranks] * num_ranks


def test_traffic_counts_ids_rows_and_gradients_both_ways():
    (plan,) = plan_tables([spec(1000, 16, dtype=torch.bfloat16)], num_ranks=4)
    # 3 of 4 ids live elsewhere; 8 bytes an id, 2 a bfloat16 weight, 4 a gradient; as much comes in as goes out.
    assert plan.traffic_mib(100) * MIB == 2 * 75 * (8 + 16 * 2 + 16 * 4)
    (alone,) = plan_tables([spec(1000, 16)], num_ranks=1)
    assert alone.traffic_mib(100) == 0


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_traffic_of_a_replicated_table_is_its_dense_gradient(dtype, width):
    (plan,) = plan_tables([spec(10, 3, dtype=dtype)], num_ranks=4, replicate_below_mb=1)
    assert plan.traffic_mib(5) * MIB == 2 * 10 * (3 + 1) * width


def test_the_printed_plan_has_a_line_for_each_rank_and_table():
    plans = plan_tables(
        [spec(10_001, 64, name="item"), spec(20, 4, name="country")], num_ranks=2, replicate_below_mb=0.01
    )
    rows = plan_rows(plans, unique_ids=1000)
    assert [(r["rank"], r["table"], r["kind"], r["first row"], r["rows"]) for r in rows] == [
        ("0", "item", "rows", "0", "5,001"),
        ("0", "country", "replicated", "0", "20"),
        ("1", "item", "rows", "5,001", "5,000"),
        ("1", "country", "replicated", "0", "20"),
    ]
    assert rows[0]["MiB"] == f"{5001 * 64 * 4 / MIB:.1f}"
    assert rows[0]["traffic MiB/step"] == f"{plans[0].traffic_mib(1000):.2f}"
    assert plan_rows([], unique_ids=5) == []
    each = plan_rows(plans, unique_ids={"item": 10**9})
    assert each[0]["traffic MiB/step"] == f"{plans[0].traffic_mib(10_001):.2f}"


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(PlanError, match="same name"):
        plan_tables([spec(name="a"), spec(name="a")], num_ranks=2)


@pytest.mark.parametrize("size", [{"num_rows": -10}, {"num_rows": 0}, {"dim": 0}])
def test_a_table_needs_rows_and_width(size):
    with pytest.raises(PlanError, match="table 'item' has no rows or no width"):
        spec(**size)
