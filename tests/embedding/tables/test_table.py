"""EmbeddingTable: initial values, updates in place, stochastic rounding, sums in a fixed order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.optimizer import rule_of, updated
from freescale.embedding.tables import table as table_module
from freescale.embedding.tables.table import EmbeddingTable, as_compute
from freescale.kernels.rows.api import sum_by_row
from tests.effort import examples


def make_table(num_rows=20, dim=4, **options):
    return EmbeddingTable(num_rows, dim, **{"optimizer": SGD(), "seed": 5, **options})


@examples(17, thorough=200)
@given(
    cuts=st.lists(st.integers(0, 50), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_initial_values_do_not_depend_on_the_blocks(cuts, dtype):
    whole = make_table(50, dtype=dtype).weight
    edges = [0, *sorted(cuts), 50]
    blocks = [make_table(b - a, first_row=a, dtype=dtype).weight for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(blocks), whole)


def test_initial_values_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    whole = make_table(50).weight
    monkeypatch.setattr(table_module, "_INIT_CHUNK_ROWS", 7)
    assert torch.equal(make_table(50).weight, whole)


def test_initial_values_have_the_standard_deviation_asked_for_and_follow_the_seed():
    weight = make_table(5000, init_std=0.1).weight
    assert float(weight.std()) == pytest.approx(0.1, rel=0.02)
    assert abs(float(weight.mean())) < 0.003
    assert not torch.isclose(weight, make_table(5000, init_std=0.1, seed=6).weight).all(1).any()


def test_initial_gives_the_values_a_row_had_at_the_start():
    table = make_table(first_row=100)
    before = table.weight.clone()
    table.weight.zero_()
    rows = torch.tensor([3, 0, 19])
    assert torch.equal(table.initial(rows), before[rows])


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_state_is_kept_in_float32_or_better(dtype, state_dtype):
    table = make_table(dtype=dtype, optimizer=Adam())
    assert table.weight.dtype == dtype
    assert {values.dtype for values in table.state.values()} == {state_dtype}


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()])
def test_apply_changes_the_rows_it_is_given_and_no_others(optimizer):
    table = make_table(optimizer=optimizer, dtype=torch.float64)
    before = table.weight.clone()
    rows, grad = torch.tensor([2, 7, 19]), torch.ones(3, 4, dtype=torch.float64)
    table.apply(rows, grad, lr=0.1, step=1)
    moved = (table.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == rows.tolist()
    assert all((values[~moved] == 0).all() and (values[moved] != 0).all() for values in table.state.values())
    table.apply(rows[:0], grad[:0], lr=0.1, step=2)
    assert (table.weight != before).any(1).nonzero().flatten().tolist() == rows.tolist()


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()])
def test_two_steps_are_those_of_the_rule_itself(optimizer):
    table = make_table(optimizer=optimizer, dtype=torch.float64)
    rows = torch.tensor([1, 5])
    weight = table.weight[rows].clone()
    shapes = optimizer.state_shapes(2, 4)
    state = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in (1, 2):
        grad = torch.full((2, 4), 0.3 * step, dtype=torch.float64)
        table.apply(rows, grad, lr=0.1, step=step)
        weight = updated(optimizer, weight, state, grad, lr=0.1, step=step)
    torch.testing.assert_close(table.weight[rows], weight, rtol=0, atol=1e-15)
    assert all(torch.equal(table.state[name][rows], state[name]) for name in state)


def rounded(values: torch.Tensor, *, step: int = 1, first_row: int = 0) -> torch.Tensor:
    """These float32 values after the table has stored them as bfloat16, by way of a gradient step from zero."""
    table = make_table(*values.shape, dtype=torch.bfloat16, first_row=first_row)
    table.weight.zero_()
    table.apply(torch.arange(len(values)), -values, lr=1.0, step=step)
    return table.weight.float()


def neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 values just below and above, by magnitude."""
    low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    high = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    return low, high


@examples(33, thorough=200)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=20))
def test_bfloat16_rounds_to_a_neighbour_and_keeps_what_it_can_hold(numbers):
    values = torch.tensor(numbers)[:, None]
    low, high = neighbours(values)
    got = rounded(values)
    assert bool(((got == low) | (got == high)).all())
    assert torch.equal(rounded(low), low)


@pytest.mark.parametrize("value", [1 + 1 / 1024, -(1 + 1 / 1024), 0.3, 1e-3, 7.77e8])
def test_bfloat16_rounding_is_right_on_average(value):
    values = torch.full((20_000, 4), value)
    low, high = neighbours(values)
    got = rounded(values)
    assert (got == low).any()
    assert (got == high).any()
    spacing = float((high - low)[0, 0].abs())
    assert abs(float(got.double().mean()) - float(values[0, 0])) < 0.01 * spacing


def test_bfloat16_small_updates_add_up_where_plain_rounding_would_lose_them():
    table = make_table(1000, dtype=torch.bfloat16)
    table.weight.fill_(1.0)
    rows, grad = torch.arange(1000), torch.full((1000, 4), -1.0)
    for step in range(1, 101):
        table.apply(rows, grad, lr=1e-3, step=step)
    assert float(table.weight.double().mean()) == pytest.approx(1.1, abs=0.002)


def test_bfloat16_rounding_depends_on_step_row_and_column_alone():
    values = torch.full((100, 4), 1 + 1 / 300)
    once = rounded(values)
    assert torch.equal(rounded(values), once)
    assert torch.equal(rounded(values[40:60], first_row=40), once[40:60])
    assert not torch.equal(rounded(values, step=2), once)
    assert len({tuple(row) for row in once.tolist()}) > 5


def test_bfloat16_keeps_infinities_and_nan():
    values = torch.tensor([[float("inf"), float("-inf"), float("nan"), -float("nan")]])
    torch.testing.assert_close(rounded(values), values, equal_nan=True, rtol=0, atol=0)


def test_as_compute_widens_all_but_float64():
    assert as_compute(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert as_compute(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e6, 1e6)), max_size=40))
def test_sum_by_row_adds_in_the_order_given(pairs):
    wanted = [0.0] * 6
    for row, value in pairs:
        wanted[row] += value
    index = torch.tensor([row for row, _ in pairs], dtype=torch.int64)
    values = torch.tensor([[value] for _, value in pairs], dtype=torch.float64).view(-1, 1)
    assert sum_by_row(index, values, 6).flatten().tolist() == wanted


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_with_a_new_owner_knows_nothing_of_the_old_one(optimizer, dtype, monkeypatch):
    monkeypatch.setattr(table_module, "_INIT_CHUNK_ROWS", 2)
    table = make_table(optimizer=optimizer, dtype=dtype)
    rows, keys = torch.tensor([3, 17, 4]), torch.tensor([2**62 + 5, -9, 3])
    table.apply(torch.arange(20), torch.randn(20, 4), lr=0.1, step=1)
    before = table.weight.clone()
    table.reset(rows, keys)
    assert all(bool((values[rows] == 0).all()) for values in table.state.values())
    others = [row for row in range(20) if row not in rows.tolist()]
    assert torch.equal(table.weight[others], before[others])
    assert all(bool((values[others] != 0).any()) for values in table.state.values())
    # Anywhere else the same owner gets the same values; they are not those of the row of that number.
    elsewhere = make_table(optimizer=optimizer, dtype=dtype, first_row=100)
    elsewhere.reset(torch.tensor([0, 1, 2]), keys)
    assert torch.equal(elsewhere.weight[:3], table.weight[rows])
    assert not torch.equal(table.weight[4], make_table(dtype=dtype).weight[3])


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()], ids=lambda each: type(each).__name__)
def test_numbers_on_the_device_move_rows_as_a_rate_does(optimizer):
    """What steps that are recorded read; the rate of a table of its own is in it, for the fused kernel, too."""
    tables = [EmbeddingTable(9, 4, optimizer=optimizer, dtype=torch.float64, lr_scale=0.25) for _ in range(2)]
    rows, grad = torch.tensor([1, 4, 7, 0, 0]), torch.randn(5, 4, dtype=torch.float64)
    for step in (1, 2, 3):
        numbers = tables[0].step_numbers(lr=0.5, step=step)
        assert numbers[0] == rule_of(optimizer).numbers(lr=0.125, step=step)[0]
        numbers = torch.tensor(numbers, dtype=torch.float64)
        tables[0].apply_counted(rows, grad, numbers=numbers, count=torch.tensor([3]))
        tables[1].apply(rows[:3], grad[:3], lr=0.5, step=step)
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-12, atol=0)
    for name, values in tables[1].state.items():
        assert torch.equal(tables[0].state[name], values)
