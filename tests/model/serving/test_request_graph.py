"""Requests of many shapes through one recorded pass: what is written before each is all that changes."""

from __future__ import annotations

import pytest
import torch

from freescale.errors import DataError
from freescale.model.compression.compressor import Compressor
from freescale.model.compression.packed_caches import PackedCaches
from freescale.model.serving.request_graph import RequestGraph
from tests.effort import quick_first
from tests.model.compression.test_compressor import DIM, KINDS, make_events, make_model, part

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU; see tests/gpu"
)
HISTORY, LENGTHS = [34, 0, 17, 25], [40, 5, 23, 28]


def make_server(kind):
    server = Compressor(make_model(kind), model="m1")
    vectors, batch = make_events(LENGTHS)
    store = server.compress(*part(vectors, batch, [0] * 4, HISTORY))
    assert isinstance(store, PackedCaches)
    return server, store, part(vectors, batch, HISTORY, LENGTHS)


@pytest.mark.parametrize("kind", quick_first(KINDS, "hstu", "llama"))
def test_a_recorded_pass_answers_as_a_new_one(kind):
    """Replayed with fewer users, others, one of them twice; nothing of an earlier request is left."""
    server, store, (recent, asked) = make_server(kind)
    passes = []

    def record(run):
        passes.append(run())  # as a warm-up does
        return run

    graph = RequestGraph(server, store, users=4, recent=7, dim=DIM, record=record)
    wanted = server.states(recent, asked, store)
    rows = [torch.arange(a, b) for a, b in zip(asked.offsets[:-1].tolist(), asked.offsets[1:].tolist())]
    for users in ([0, 1, 2, 3], [2], [3, 3, 1], [0, 1, 2, 3]):
        own = torch.cat([rows[user] for user in users])
        got = graph.states(recent[own], asked.select(users), users)
        torch.testing.assert_close(got, wanted[own], rtol=0, atol=1e-5)
    assert len(passes) == 1


def test_what_does_not_fit_is_refused():
    server, store, (recent, asked) = make_server("hstu")
    for room in ({"users": 3, "recent": 7}, {"users": 4, "recent": 4}):
        graph = RequestGraph(server, store, **room, dim=DIM, record=lambda run: run)
        with pytest.raises(DataError, match="does not fit into the recorded graph"):
            graph.states(recent, asked, range(4))
