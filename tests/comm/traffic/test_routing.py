"""Routing by owner is a dictionary: whoever owns a key hears of it from all ranks, and values find their way back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freescale.comm.traffic.routing import OwnedKeys, Route, ask_owners, route_by_owner, routes_by_edges
from freescale.comm.transport import AloneTransport
from freescale.comm.transports.kinds.collective import CollectiveTransport, Pending, Transport
from tests.effort import examples
from tests.ranks import run_on_ranks


class Board:
    """Threads as ranks: what one of them sends lies here until all have sent."""

    def __init__(self, num_ranks: int) -> None:
        self.sent: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)


class ThreadTransport(AloneTransport):
    """One rank of a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank, self.num_ranks = board, rank, len(board.sent)
        self.log: list[str] = []

    def start(self, tensor: Tensor, *, send: Any, receive: Any) -> Pending:
        self.log.append("start")
        assert sum(send) == len(tensor)
        got = torch.cat(self._swap(tensor.split(list(send))))
        assert len(got) == sum(receive)
        return AloneTransport().start(got, send=receive, receive=receive)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        self.log.append("counts")
        return torch.cat(self._swap(counts.split(1)))

    def _swap(self, parts: Any) -> list[Tensor]:
        self._board.sent[self.rank] = parts
        self._board.barrier.wait()
        got = [sent[self.rank].clone() for sent in self._board.sent]
        self._board.barrier.wait()
        return got


def on_threads(num_ranks: int, do: Callable[[Transport], Any]) -> list[Any]:
    board = Board(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank: do(ThreadTransport(board, rank)), range(num_ranks)))


def value_of(key: int, rank: int) -> float:
    """What a rank has for a key; sums of several depend on their order."""
    return 0.1 * (rank + 1) + key % 1009 / 7


def check(
    channel: Transport, asked: list[list[int]], owner: dict[int, int], make: Callable[[Tensor], Route]
) -> Route:
    """One rank's view of a whole exchange, against a dictionary."""
    rank = channel.rank
    keys = torch.tensor(asked[rank], dtype=torch.int64)
    route = make(keys)
    owned = OwnedKeys.of(route.to_owners(keys, channel=channel).wait())
    wanted = [key for keys_of in asked for key in keys_of if owner[key] == rank]
    assert owned.wanted.tolist() == wanted
    assert owned.unique.tolist() == sorted(set(wanted))
    assert owned.unique[owned.inverse].tolist() == wanted
    assert route.send == [sum(owner[key] == r for key in asked[rank]) for r in range(channel.num_ranks)]
    assert route.receive == [sum(owner[key] == rank for key in keys_of) for keys_of in asked]
    answers = owned.spread(owned.unique * 3 + rank)
    back = route.to_askers(answers, channel=channel).wait()
    assert back.tolist() == [key * 3 + owner[key] for key in asked[rank]]
    grad = torch.tensor([[value_of(key, rank), 1.0] for key in asked[rank]], dtype=torch.float64).view(-1, 2)
    sums: dict[int, float] = {}
    for other, keys_of in enumerate(asked):
        for key in keys_of:
            sums[key] = sums[key] + value_of(key, other) if key in sums else value_of(key, other)
    summed = owned.sum(route.to_owners(grad, channel=channel).wait())
    assert summed[:, 0].tolist() == [sums[key] for key in owned.unique.tolist()]
    assert summed[:, 1].tolist() == [wanted.count(key) for key in owned.unique.tolist()]
    return route


KEYS = st.sets(st.integers(0, 40) | st.integers(-(2**40), 2**40), max_size=25).map(sorted)


@examples(20, thorough=200)
@given(st.data())
def test_any_owner(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    asked = [data.draw(KEYS) for _ in range(num_ranks)]
    owner = {key: data.draw(st.integers(0, num_ranks - 1)) for keys in asked for key in keys}

    def of(keys: Tensor) -> Tensor:
        return torch.tensor([owner[key] for key in keys.tolist()], dtype=torch.int64)

    def one(channel: Transport) -> Any:
        check(channel, asked, owner, lambda keys: route_by_owner(of(keys), channel=channel))
        calls: list[list[int]] = []

        def answer(keys: Tensor) -> Tensor:
            calls.append(keys.tolist())
            return keys * 2 + channel.rank

        keys = torch.tensor(asked[channel.rank], dtype=torch.int64)
        found = ask_owners(keys, owner=of, answer=answer, channel=channel)
        assert found.tolist() == [2 * key + owner[key] for key in asked[channel.rank]]
        everybody = sorted({key for keys_of in asked for key in keys_of if owner[key] == channel.rank})
        assert calls == [everybody], "asked once, with the keys of all ranks, ascending"

    on_threads(num_ranks, one)


@examples(20, thorough=200)
@given(st.data())
def test_contiguous_owners(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    asked = [sorted(data.draw(st.sets(st.integers(0, 29), max_size=20))) for _ in range(num_ranks)]
    inner = sorted(data.draw(st.lists(st.integers(0, 30), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    edges = torch.tensor([0, *inner, 30])
    owner = {key: sum(key >= edge for edge in inner) for key in range(30)}
    largest = max(sum(owner[key] == r for key in keys) for keys in asked for r in range(num_ranks))

    def one(channel: ThreadTransport) -> list[str]:
        def plain(keys: Tensor) -> Route:
            return routes_by_edges([keys], [edges], channel=channel)[0]

        def told(keys: Tensor) -> Route:
            return routes_by_edges([keys], [edges], channel=channel, tell_largest=True)[0]

        assert check(channel, asked, owner, plain).order is None
        assert check(channel, asked, owner, told).largest == largest
        return channel.log

    # Ids, rows and gradients: three transfers, and sizes before them in one more.
    once = ["start"] * 3
    assert on_threads(num_ranks, one) == [["counts", *once, "start", *once]] * num_ranks  # type: ignore[arg-type]


def over_gloo(rank: int) -> None:
    channel = CollectiveTransport(dist.group.WORLD)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(4)
    asked = [
        sorted(set(torch.randint(0, 50, (n,), generator=draw).tolist()))
        for n in (30, 0, 17)[: channel.num_ranks]
    ]
    owner = {key: key * 7 % 5 % channel.num_ranks for key in range(50)}
    check(
        channel, asked, owner, lambda keys: route_by_owner(keys * 7 % 5 % channel.num_ranks, channel=channel)
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_between_processes(num_ranks: int) -> None:
    run_on_ranks(over_gloo, num_ranks)
