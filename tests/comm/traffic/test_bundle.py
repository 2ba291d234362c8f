"""A bundle is what its tensors are one by one: the same bits arrive, in one transfer."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freescale.comm.traffic.bundle import WORD, Bundle
from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport, Transport
from tests.comm.traffic.test_routing import ThreadTransport, on_threads
from tests.effort import examples
from tests.ranks import run_on_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
SHAPES = ((), (1,), (3,), (64,), (2, 5), (0,))
Kind = tuple[torch.dtype, tuple[int, ...]]
Counts = list[list[list[int]]]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, list[Kind], Counts]:
    """Ranks, kinds of tensors, and rows of each from every rank to every other."""
    num_ranks = draw(st.integers(1, 4))
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=5)
    )
    # Often nothing at all between two ranks, and often no row of a whole tensor.
    count = st.sampled_from([0, 0, 1, 2, 7, 130])
    row = st.lists(count, min_size=num_ranks, max_size=num_ranks)
    empty = st.just([[0] * num_ranks] * num_ranks)
    table = st.lists(row, min_size=num_ranks, max_size=num_ranks) | empty
    return num_ranks, kinds, [draw(table) for _ in kinds]


def made(rank: int, kinds: list[Kind], counts: Counts) -> list[Tensor]:
    """What a rank sends: any bytes, also those that are no numbers."""
    found = []
    for n, ((dtype, shape), table) in enumerate(zip(kinds, counts)):
        generator = torch.Generator().manual_seed(100 * rank + n)
        size = (sum(table[rank]), *shape)
        if dtype == torch.bool:
            found.append(torch.rand(size, generator=generator) < 0.5)
            continue
        wide = (sum(table[rank]), math.prod(shape) * dtype.itemsize)
        raw = torch.randint(0, 256, wide, generator=generator, dtype=torch.uint8)
        found.append(raw.view(-1).view(dtype).view(size))
    return found


def bits(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(channel: Transport, kinds: list[Kind], counts: Counts) -> int:
    """One rank's view: a bundle against a transfer for each tensor; the words of the message."""
    rank, num_ranks = channel.rank, channel.num_ranks
    values = made(rank, kinds, counts)
    send = [table[rank] for table in counts]
    receive = [[table[other][rank] for other in range(num_ranks)] for table in counts]
    largest = [max(map(max, table)) for table in counts]
    alone = [
        channel.start(each, send=to, receive=back).wait() for each, to, back in zip(values, send, receive)
    ]
    before = [bits(each) for each in values]
    bundle = Bundle.of(values, send=send, receive=receive, largest=largest)
    assert sum(bundle.send) == len(bundle.message)
    assert max(bundle.send) <= bundle.largest
    arrived = bundle.start(channel).wait()
    assert [each.shape for each in arrived] == [each.shape for each in alone]
    assert [each.dtype for each in arrived] == [dtype for dtype, _ in kinds]
    assert [bits(each) for each in arrived] == [bits(each) for each in alone]
    assert [bits(each) for each in values] == before
    return len(bundle.message)


@examples(60, 1000)
@given(traffic())
def test_a_bundle_equals_separate_transfers(given: tuple[int, list[Kind], Counts]) -> None:
    num_ranks, kinds, counts = given
    if num_ranks == 1:
        check(AloneTransport(), kinds, counts)
    else:
        on_threads(num_ranks, lambda channel: check(channel, kinds, counts))


def _on_ranks(rank: int, seed: int) -> None:
    channel = CollectiveTransport(dist.group.WORLD, device=torch.device("cpu"))
    rng = random.Random(seed)
    for _ in range(4):
        kinds = [(rng.choice(DTYPES), rng.choice(SHAPES)) for _ in range(rng.randrange(1, 6))]
        counts = [
            [[rng.choice((0, 1, 90)) for _ in range(channel.num_ranks)] for _ in range(channel.num_ranks)]
            for _ in kinds
        ]
        check(channel, kinds, counts)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_through_real_ranks(num_ranks: int) -> None:
    run_on_ranks(_on_ranks, num_ranks, num_ranks)


def test_one_transfer_whatever_the_number_of_tensors() -> None:
    def do(channel: ThreadTransport) -> list[str]:
        values = [torch.zeros(2 * n, 3) for n in range(11)]
        counts = [[n, n] for n in range(11)]
        Bundle.of(values, send=counts, receive=counts).start(channel).wait()
        return channel.log

    assert on_threads(2, do) == [["start"], ["start"]]


def test_one_tensor_travels_as_it_is_and_several_with_less_than_a_word_a_rank_too_much() -> None:
    alone = torch.zeros(6, 5)
    options: dict[str, Any] = {"send": [[2, 4]], "receive": [[1, 1]]}
    assert Bundle.of([alone], **options).message is alone
    values = [torch.zeros(6, 5), torch.zeros(6, dtype=torch.bool)]
    bundle = Bundle.of(values, send=[[2, 4]] * 2, receive=[[2, 4]] * 2)
    own = sum(each.numel() * each.itemsize for each in values)
    assert own <= bundle.message.numel() < own + 2 * WORD
