"""What two batches share is found by the owners and told in one bit a row; subsets are the same on both sides."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.embedding import SGD
from freescale.embedding.sharding.plan import TableSpec, plan_tables
from freescale.embedding.sharding.request import _pack, _unpack, exchange_ids, find_overlaps
from freescale.errors import DataError
from freescale.kernels.rows.api import overlap
from tests.ranks import run_on_ranks

SORTED = st.sets(st.integers(-(2**62), 2**62) | st.integers(0, 30), max_size=40).map(sorted)


@given(SORTED, SORTED)
def test_shared_values_are_marked_in_both(first, second):
    a, b = (torch.tensor(each, dtype=torch.int64) for each in (first, second))
    in_second, in_first = overlap(a, b)
    assert in_second.tolist() == [value in set(second) for value in first]
    assert in_first.tolist() == [value in set(first) for value in second]


@given(st.data())
def test_bits_come_out_as_they_went_in(data):
    num_ranks = data.draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 20), min_size=num_ranks, max_size=num_ranks)
    sizes = data.draw(counts), data.draw(counts)
    rng = np.random.default_rng(1)
    marks = [rng.random(sum(size)) < 0.5 for size in sizes]
    message, num_bytes = _pack(marks, sizes)
    assert len(message) == sum(num_bytes) == sum((a + 7) // 8 + (b + 7) // 8 for a, b in zip(*sizes))
    for mark, out in zip(marks, _unpack(message, sizes)):
        assert (mark == out).all()


class Counting(CollectiveTransport):
    """Counts the bytes that leave."""

    num_bytes = 0

    def start(self, tensor, *, send, receive):
        self.num_bytes += tensor.nbytes
        return super().start(tensor, send=send, receive=receive)


def check_parts(rank: int, num_ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 5, 50])
    spec = TableSpec(name="item", num_rows=num_rows, dim=2, optimizer=SGD())
    (plan,) = plan_tables([spec], num_ranks=num_ranks)
    first, count = plan.block(rank)
    ids = [
        [[rng.randrange(num_rows) for _ in range(rng.choice([0, 3, 30]))] for _ in range(num_ranks)]
        for _ in range(2)
    ]
    channel = Counting(dist.group.WORLD)
    requests = [
        exchange_ids(plan, torch.tensor(batch[rank], dtype=torch.int64), channel=channel) for batch in ids
    ]
    channel.num_bytes = 0
    (overlaps,) = find_overlaps([(requests[0], requests[1])], channel=channel)
    unique_ids = sum(len(request.owned.wanted) for request in requests)
    assert channel.num_bytes <= unique_ids / 8 + 2 * num_ranks, "one bit for each unique id, on full bytes"
    everybody = [{row for part in batch for row in part} for batch in ids]
    both = everybody[0] & everybody[1]
    for batch, request, marks in zip(ids, requests, overlaps):
        mine = sorted(set(batch[rank]))
        assert request.unique.tolist() == mine
        assert request.unique[request.inverse].tolist() == batch[rank]
        assert request.route.largest == max(
            sum(b <= row < b + c for row in set(part))
            for part in batch
            for b, c in map(plan.block, range(num_ranks))
        )
        parts = request.split(marks)
        for part, rows in zip(parts, (both, set(range(num_rows)) - both)):
            assert [mine[n] for n in part.index.tolist()] == [row for row in mine if row in rows]
            assert sum(part.route.send) == len(part.index)
            asked = [row for other in batch for row in sorted(set(other)) if row in rows]
            local = [row - first for row in asked if first <= row < first + count]
            assert part.owned.wanted.tolist() == local
            assert sum(part.route.receive) == len(local)
            assert part.owned.unique.tolist() == sorted(set(local))
            assert part.owned.unique[part.owned.inverse].tolist() == local
        whole = request.whole()
        assert whole.index.tolist() == list(range(len(mine)))
        assert whole.owned.unique[whole.owned.inverse].tolist() == whole.owned.wanted.tolist()


def check_many(rank: int, num_ranks: int) -> None:
    for seed in range(30):
        check_parts(rank, num_ranks, seed)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_subsets_are_what_the_batches_share_and_what_not(num_ranks):
    run_on_ranks(check_many, num_ranks, num_ranks)


def test_a_row_outside_the_table_is_refused():
    (plan,) = plan_tables([TableSpec(name="genre", num_rows=4, dim=1, optimizer=SGD())], num_ranks=1)
    with pytest.raises(DataError, match="row 4 lies outside table 'genre'"):
        exchange_ids(plan, torch.tensor([1, 4]), channel=AloneTransport())
