"""Sparse optimizers against torch's own on the rows they touch, and against formulas written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding import SGD, Adam, RowwiseAdagrad, TableSpec
from freescale.embedding.optimizer import make_optimizer, updated
from freescale.errors import ConfigError
from freescale.registry import names
from tests.effort import examples

NUM_ROWS, DIM, NUM_STEPS = 6, 3, 7
LRS = [0.1 / (step + 1) for step in range(NUM_STEPS)]


def make_gradients(touched_by_step, dim=DIM, seed=0):
    """One dense gradient a step, zero outside of the rows touched."""
    generator = torch.Generator().manual_seed(seed)
    for touched in touched_by_step:
        grad = torch.zeros(NUM_ROWS, dim, dtype=torch.float64)
        grad[touched] = torch.randn(len(touched), dim, generator=generator, dtype=torch.float64)
        yield grad


def start(dim=DIM):
    return torch.linspace(-1, 1, NUM_ROWS * dim, dtype=torch.float64).view(NUM_ROWS, dim)


def run_ours(optimizer, touched_by_step, dim=DIM):
    weight = start(dim)
    state = {n: torch.zeros(s, dtype=torch.float64) for n, s in optimizer.state_shapes(NUM_ROWS, dim).items()}
    for step, (touched, grad) in enumerate(
        zip(touched_by_step, make_gradients(touched_by_step, dim)), start=1
    ):
        part = {name: values[touched] for name, values in state.items()}
        weight[touched] = updated(
            optimizer, weight[touched], part, grad[touched], lr=LRS[step - 1], step=step
        )
        for name, values in part.items():
            state[name][touched] = values
    return weight, state


def run_torch(make, touched_by_step, dim=DIM, sparse=False):
    weight = start(dim).requires_grad_()
    optimizer = make([weight])
    for n, grad in enumerate(make_gradients(touched_by_step, dim)):
        weight.grad = grad.to_sparse(1) if sparse else grad
        optimizer.param_groups[0]["lr"] = LRS[n]
        optimizer.step()
    return weight.detach()


EVERY_ROW = [list(range(NUM_ROWS))] * NUM_STEPS
SOME_ROWS = st.lists(
    st.lists(st.integers(0, NUM_ROWS - 1), unique=True).map(sorted), min_size=NUM_STEPS, max_size=NUM_STEPS
)


@examples(17, thorough=200)
@given(SOME_ROWS)
def test_sgd_is_torch_sgd(touched):
    weight, state = run_ours(SGD(), touched)
    torch.testing.assert_close(weight, run_torch(lambda p: torch.optim.SGD(p, lr=1.0), touched))
    assert state == {}


@examples(17, thorough=200)
@given(SOME_ROWS)
def test_rowwise_adagrad_of_width_one_is_torch_adagrad(touched):
    weight, _ = run_ours(RowwiseAdagrad(eps=1e-3), touched, dim=1)
    wanted = run_torch(lambda p: torch.optim.Adagrad(p, lr=1.0, eps=1e-3), touched, dim=1)
    torch.testing.assert_close(weight, wanted)


@examples(17, thorough=200)
@given(SOME_ROWS)
def test_rowwise_adagrad_keeps_the_mean_square_of_each_row(touched):
    weight, state = run_ours(RowwiseAdagrad(eps=1e-3), touched)
    wanted, sums = start().tolist(), [0.0] * NUM_ROWS
    for n, grad in enumerate(make_gradients(touched)):
        for row in touched[n]:
            g = grad[row].tolist()
            sums[row] += sum(x * x for x in g) / DIM
            wanted[row] = [w - LRS[n] * x / (sums[row] ** 0.5 + 1e-3) for w, x in zip(wanted[row], g)]
    torch.testing.assert_close(weight, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(state["square_sum"][:, 0], torch.tensor(sums, dtype=torch.float64))


def test_adam_is_torch_adam_where_every_row_is_touched():
    weight, _ = run_ours(Adam(beta1=0.8, beta2=0.95, eps=1e-3), EVERY_ROW)
    wanted = run_torch(lambda p: torch.optim.Adam(p, betas=(0.8, 0.95), eps=1e-3), EVERY_ROW)
    torch.testing.assert_close(weight, wanted)


@examples(17, thorough=200)
@given(SOME_ROWS)
def test_adam_is_torch_sparse_adam_where_some_rows_are_touched(touched):
    # SparseAdam adds eps before the bias correction, Adam after it: with an eps of nothing they agree.
    weight, _ = run_ours(Adam(beta1=0.8, beta2=0.95, eps=1e-300), touched)
    wanted = run_torch(
        lambda p: torch.optim.SparseAdam(p, betas=(0.8, 0.95), eps=1e-300), touched, sparse=True
    )
    torch.testing.assert_close(weight, wanted)


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()])
def test_rows_that_are_not_touched_rest_with_their_state(optimizer):
    before, state_before = run_ours(optimizer, [[1, 2], [], [2, 4], [], [], [], []])
    after, state_after = run_ours(optimizer, [[1, 2], [], [2, 4], [3], [0], [3, 0], [5]])
    kept = [1, 2, 4]
    assert torch.equal(before[kept], after[kept])
    assert all(torch.equal(state_before[name][kept], state_after[name][kept]) for name in state_before)


@pytest.mark.parametrize("optimizer", [SGD(), RowwiseAdagrad(), Adam()])
def test_a_zero_gradient_on_a_fresh_row_changes_nothing(optimizer):
    rows, zeros = start(), torch.zeros(NUM_ROWS, DIM, dtype=torch.float64)
    shapes = optimizer.state_shapes(NUM_ROWS, DIM)
    state = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    assert torch.equal(updated(optimizer, rows.clone(), state, zeros, lr=1.0, step=1), rows)


def test_optimizers_are_made_by_name_with_their_options():
    assert make_optimizer("sgd") == SGD()
    assert make_optimizer("rowwise_adagrad", eps=0.5) == RowwiseAdagrad(eps=0.5)
    assert make_optimizer("adam", beta1=0.1, beta2=0.2, eps=0.3) == Adam(beta1=0.1, beta2=0.2, eps=0.3)
    assert names("optimizer")[:3] == ["adam", "rowwise_adagrad", "sgd"]
    with pytest.raises(ConfigError, match="adamw"):
        make_optimizer("adamw")


def test_an_option_the_kind_does_not_know_is_refused_by_name():
    with pytest.raises(ConfigError, match="optimizer 'sgd' has no option 'beta1'"):
        make_optimizer("sgd", beta1=0.9)
    with pytest.raises(ConfigError, match="did you mean 'beta2'"):
        make_optimizer("adam", beta_2=0.9)


@pytest.mark.parametrize(
    ("name", "shape", "wrong"),
    [
        ("age", lambda n: (n,), "is not one row of numbers"),
        ("age", lambda n: (7, 1), "is not one row of numbers"),
        ("age", lambda n: (n, 0), "is not one row of numbers"),
        ("weight", lambda n: (n, 1), "cannot be saved under that name"),
        ("a.b", lambda n: (n, 1), "cannot be saved under that name"),
    ],
)
def test_state_that_could_not_be_kept_row_by_row_is_refused(name, shape, wrong):
    class Strange(SGD):
        def state_shapes(self, num_rows, dim):
            return {name: shape(num_rows)}

    with pytest.raises(ConfigError, match=wrong):
        TableSpec(name="item", num_rows=5, dim=2, optimizer=Strange())


@examples(20, thorough=200)
@given(
    optimizer=st.sampled_from([SGD(), RowwiseAdagrad(), Adam()]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    dim=st.integers(1, 70),
    num_rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_row_gets_the_same_bits_whichever_rows_are_updated_with_it(
    optimizer, dtype, dim, num_rows, seed, data
):
    draw = torch.Generator().manual_seed(seed)
    rows, grad = (torch.randn(num_rows, dim, generator=draw, dtype=dtype) for _ in range(2))
    state = {
        name: torch.rand(shape, generator=draw, dtype=dtype)
        for name, shape in optimizer.state_shapes(num_rows, dim).items()
    }
    some = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True).map(sorted))
    part = {name: values[some] for name, values in state.items()}
    apart = updated(optimizer, rows[some], part, grad[some], lr=0.1, step=3)
    together = updated(optimizer, rows, state, grad, lr=0.1, step=3)
    assert torch.equal(apart, together[some])
    for name, values in part.items():
        assert torch.equal(values, state[name][some])
