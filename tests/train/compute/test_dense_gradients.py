"""Dense gradients: summed over the ranks, over sockets as over the group, and no earlier than the backward needs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freescale.comm.transports.kinds import collective, local
from freescale.train.compute import dense_gradients
from freescale.train.compute.dense_gradients import in_pieces, reduced_in_backward
from tests.effort import slow
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1)
    ).double()


def data_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def compare(rank: int, num_ranks: int, one_machine: bool) -> None:
    """Three steps, the second of which is accumulated from two backwards, against one model that sees everything."""
    if one_machine:
        os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    (model, sums), alone = reduced_in_backward(make_model(), dist.group.WORLD), make_model()
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        if step == 1:
            with model.no_sync():
                model(data_of(rank, 7)).sum().backward()
        model(data_of(rank, step)).sum().backward()
        sums.wait()
        for each in range(num_ranks):
            for part in (step, 7) if step == 1 else (step,):
                alone(data_of(each, part)).sum().backward()
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [slow(2), 3])
@pytest.mark.parametrize("one_machine", [False, True])
def test_gradients_are_the_sums_over_the_ranks(num_ranks, one_machine):
    run_on_ranks(compare, num_ranks, num_ranks, one_machine)


def compare_between_machines(rank: int, num_ranks: int) -> list[int]:
    """The bytes of every bucket that went straight to the others."""
    sizes = []
    start = dense_gradients.start_all_reduce
    dense_gradients.start_all_reduce = lambda transport, values: (
        sizes.append(values.nbytes) or start(transport, values)
    )
    compare(rank, num_ranks, False)
    return sizes


def test_between_machines_buckets_go_straight_and_large_ones_round_a_ring_of_many():
    large = dense_gradients._ONE_TRIP_BYTES
    for straight in run_on_ranks(compare_between_machines, 2, 2):
        assert max(straight) > large
    for straight in run_on_ranks(compare_between_machines, 3, 3):
        assert straight
        assert max(straight) <= large


def bits_between_machines(rank: int) -> list[bytes]:
    model, sums = reduced_in_backward(make_model(), dist.group.WORLD)
    model(data_of(rank, 0)).sum().backward()
    sums.wait()
    return [param.grad.numpy().tobytes() for param in model.parameters()]


def test_every_rank_has_the_same_bits():
    first, *others = run_on_ranks(bits_between_machines, 3)
    assert all(other == first for other in others)


def compare_staged(rank: int, num_ranks: int) -> None:
    """As if the gradients lived on a GPU that the ranks share."""
    for module in (dense_gradients, collective):
        module.supports_device = lambda group, device: False
    compare(rank, num_ranks, False)


@pytest.mark.parametrize("num_ranks", [slow(2), 3])
def test_gradients_of_a_shared_gpu_are_staged(num_ranks):
    run_on_ranks(compare_staged, num_ranks, num_ranks)


def compare_queued(rank: int, num_ranks: int) -> int:
    """As if waiting were left to a stream: every bucket is summed where it is handed over. How many there were."""
    local.SocketTransport.queued = True
    buckets = []
    start = dense_gradients.start_all_reduce
    dense_gradients.start_all_reduce = lambda transport, values: (
        buckets.append(len(values)) or start(transport, values)
    )
    compare(rank, num_ranks, True)
    return len(buckets)


@pytest.mark.parametrize("num_ranks", [slow(2), 3])
def test_buckets_are_summed_beside_the_backward_where_waiting_only_queues(num_ranks):
    assert (
        min(run_on_ranks(compare_queued, num_ranks, num_ranks)) > 3
    )  # steps: the model is more than one bucket


def seconds_until_the_input_has_its_gradient(rank: int, one_machine: bool) -> tuple[float, float]:
    """Rank 1 comes late; rank 0 must not wait for it before its own backward is through: when it is, when it ends."""
    if one_machine:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, _ = reduced_in_backward(make_model(), dist.group.WORLD)
    model(data_of(rank, 0)).sum().backward()
    dist.barrier()
    seen = []
    values = data_of(rank, 1).requires_grad_()
    values.register_post_accumulate_grad_hook(lambda _: seen.append(time.perf_counter()))
    loss = model(values).sum()
    if rank == 1:
        time.sleep(4.0)
    start = time.perf_counter()
    loss.backward()
    return seen[0] - start, time.perf_counter() - start


@pytest.mark.parametrize("one_machine", [False, True])
def test_nobody_waits_before_the_backward_is_through(one_machine):
    gradient, backward = run_on_ranks(seconds_until_the_input_has_its_gradient, 2, one_machine)[0]
    assert gradient < 2
    assert (backward < 2) == (not one_machine), "between machines rows travel before anybody waits"


class _Queued:
    """What NCCL returns: nobody may ask for its future."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class _Bucket:
    def buffer(self) -> torch.Tensor:
        return torch.ones(2)


def test_sums_of_nccl_hold_the_gate_until_the_end_of_the_backward_and_touch_no_other_stream(monkeypatch):
    work, gate, sums = _Queued(), dense_gradients.Gate(), dense_gradients.Sums(outlast_backward=True)
    monkeypatch.setattr(dist, "all_reduce", lambda values, group, async_op: work)
    hook = dense_gradients._over_group(None, gate, sums)
    held = []

    def reduce(grad: torch.Tensor) -> None:
        hook(None, _Bucket())
        held.append(not gate._is_free(dense_gradients.Deadline.IDS))

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(reduce)
    (2 * weight).sum().backward()
    assert held == [True]
    assert gate._is_free(dense_gradients.Deadline.IDS)
    assert not work.waited
    sums.wait()
    assert work.waited


def weights(*counts: int) -> list[nn.Parameter]:
    """Parameters of so many numbers, of 4 bytes each."""
    return [nn.Parameter(torch.zeros(count)) for count in counts]


def test_a_layer_is_not_cut_apart_by_a_piece_that_is_a_little_too_small():
    """A rest of 32 KB lay in one piece with the largest weight of the next layer, whose sum its layer waited for."""
    table, *layers = weights(160, *[40, 10, 1] * 4)
    layer_of = {id(table): -1} | {id(param): number // 3 for number, param in enumerate(layers)}
    found = in_pieces([table, *layers], 200, lambda param: layer_of[id(param)])
    assert [[layer_of[id(param)] for param in piece] for piece in found] == [
        [-1],
        *([[n] * 3 for n in range(4)]),
    ]
    cut = in_pieces([table, *layers], 200)
    assert any(len({layer_of[id(param)] for param in piece}) > 1 for piece in cut)


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    widths=st.lists(st.integers(1, 5), min_size=20, max_size=20),
    most=st.integers(4, 200),
)
def test_pieces_hold_everything_in_order_and_are_not_too_large(counts, widths, most):
    units = [unit for unit, width in enumerate(widths) for _ in range(width)]
    params = weights(*counts)
    unit_of = {id(param): unit for param, unit in zip(params, units)}
    found = in_pieces(params, most, lambda param: unit_of[id(param)])
    assert [id(param) for piece in found for param in piece] == [id(param) for param in params]
    for piece in found:
        size = sum(param.nbytes for param in piece)
        same = len({unit_of[id(param)] for param in piece}) == 1
        assert size <= most or len(piece) == 1 or (same and size <= 2 * most)
