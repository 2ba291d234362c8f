"""Tables whose rows are summed and updated by one kernel: alone, with owners on several ranks, and prioritized.

Here Triton's interpreter runs the kernels on the CPU; tests/gpu/test_rows_on_gpu.py does it on a GPU.
"""

from __future__ import annotations

import threading

import pytest
import torch

from freescale.embedding import SGD, Adam, PlannedRows, RowwiseAdagrad, TableSpec, UniqueRows
from freescale.errors import DataError, TrainingError
from freescale.kernels.runtime import CachedLauncher
from tests.pipeline.two_paths import (
    channels_of,
    make_embedding,
    random_batches,
    state_bits,
    train_plainly,
    train_prioritized,
)
from tests.ranks import run_on_ranks

pytest.importorskip("triton")
OPTIMIZERS = [SGD(), RowwiseAdagrad(), Adam()]


@pytest.fixture(autouse=True)
def _interpreted():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, for tensors of the GPU alone")


def item(optimizer=None, num_rows=40, dtype=torch.float32):
    return TableSpec(name="item", num_rows=num_rows, dim=6, optimizer=optimizer or SGD(), dtype=dtype)


def fused(specs, **options):
    """As on a GPU."""
    embedding = make_embedding(specs, **options)
    for table in embedding.tables.values():
        table.not_fused = None
    return embedding


def one_step(embedding, rows):
    vectors = embedding({"item": rows})["item"]
    (vectors.square() * torch.arange(1, vectors.numel() + 1).view_as(vectors).sin()).sum().backward()
    embedding.step(lr=0.1)
    return vectors.detach()


def test_a_backward_after_step_is_refused_not_lost():
    embedding = fused([item()])
    late = embedding({"item": torch.tensor([1, 2])})["item"]
    embedding.step(lr=0.1)
    with pytest.raises(TrainingError, match="'item' comes after the `step`"):
        late.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_could_be_differentiated_again_keeps_no_graph():
    embedding, plain = fused([item()]), fused([item()])
    for each, again in ((embedding, True), (plain, False)):
        factor = torch.ones((), requires_grad=True)
        (each({"item": torch.tensor([1, 2])})["item"] * factor).sum().backward(create_graph=again)
        each.step(lr=0.1)
    assert not embedding.tables["item"].weight.requires_grad
    assert torch.equal(embedding.tables["item"].weight, plain.tables["item"].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_alone_vectors_and_updates_are_those_of_the_plain_path(optimizer, dtype):
    ours, ahead = (fused([item(optimizer, dtype=dtype)]) for _ in range(2))
    plain = make_embedding([item(optimizer, dtype=dtype)])
    draw = torch.Generator().manual_seed(0)
    for shape in ((7,), (0,), (3, 5), (100,)):
        ids = torch.randint(0, 40, shape, generator=draw)
        planned, found = ahead.prepare("item", ids), plain.prepare("item", ids)
        assert isinstance(planned, PlannedRows)
        assert isinstance(found, UniqueRows)
        vectors = [one_step(ours, ids), one_step(ahead, planned), one_step(plain, found)]
        assert torch.equal(vectors[0], vectors[1])
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1 / 32, "atol": 1e-3}
        torch.testing.assert_close(vectors[0], vectors[2], **close)
        assert state_bits(ours) == state_bits(ahead)
        torch.testing.assert_close(ours.tables["item"].weight, plain.tables["item"].weight, **close)


def test_calls_of_a_step_add_up_and_without_gradients_nothing_is_remembered():
    once, twice = fused([item(Adam())]), fused([item(Adam())])
    ids = torch.tensor([1, 2, 2, 3, 2, 5])
    once({"item": ids})["item"].sum().backward()
    for part in (slice(0, 3), slice(3, 6)):
        twice({"item": ids[part]})["item"].sum().backward()
    with torch.no_grad():
        twice({"item": ids})
    once.step(lr=0.1)
    twice.step(lr=0.1)
    assert state_bits(once) == state_bits(twice)
    # A zero gradient still ages the moments of a row.
    once({"item": ids})
    (0 * twice({"item": ids})["item"]).sum().backward()
    once.step(lr=0.1)
    twice.step(lr=0.1)
    assert state_bits(once) == state_bits(twice)


def test_a_row_outside_is_told_by_a_later_call():
    embedding = fused([item()])
    assert not embedding({"item": torch.tensor([40])})["item"].any()
    with pytest.raises(DataError, match="row 40 lies outside table 'item'"):
        embedding({"item": torch.tensor([1])})
    embedding.prepare("item", torch.tensor([-3]))
    with pytest.raises(DataError, match="row -3 lies outside table 'item'"):
        embedding.state_dict()


def test_a_snapshot_is_told_the_rows_that_will_change():
    embedding, told = fused([item()]), []
    embedding.tables["item"].before_writing = lambda rows: told.append(rows.tolist())
    one_step(embedding, torch.tensor([7, 3, 7]))
    assert told == [[3, 7]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_owners_update_plainly_and_prioritized_with_the_same_bits(num_ranks):
    for bits in run_on_ranks(_both_paths, num_ranks, num_ranks, timeout=100):
        assert bits[0] == bits[1]


def _one_at_a_time():
    """The interpreter serves one thread; a rank of a CPU has two that update rows."""
    lock, start = threading.Lock(), CachedLauncher.start

    def in_turn(self, *arguments):
        with lock:
            start(self, *arguments)

    CachedLauncher.start = in_turn  # in a rank of its own, which ends with the test


def _both_paths(rank, num_ranks):
    _one_at_a_time()
    specs = [item(RowwiseAdagrad()), TableSpec(name="user", num_rows=9, dim=3, optimizer=Adam())]
    batches = random_batches(3, specs, 6, rank, num_ranks)
    plain, ahead, eager = fused(specs), fused(specs), make_embedding(specs)
    losses = train_plainly(plain, batches)
    assert train_plainly(eager, batches) == pytest.approx(losses, rel=1e-4)
    train_prioritized(ahead, batches, channels=channels_of(sockets=False), check=True)
    return state_bits(plain), state_bits(ahead)


def test_rows_that_another_embedding_has_prepared_are_refused():
    planned = fused([item()]).prepare("item", torch.arange(4))
    with pytest.raises(DataError, match="rows of table 'item' were prepared by another embedding"):
        make_embedding([item()])({"item": planned})
