"""What a GPU was given long before it runs leaves in the order of deadlines all the same."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.comm.traffic import Deadline, Gate
from freescale.pipeline.prioritized.row_moves import UrgentGradients
from freescale.pipeline.prioritized.urgent_chain import UrgentChain
from freescale.pipeline.streams import SideStream
from freescale.train.compute import dense_gradients
from freescale.train.compute.dense_gradients import QueuedSums
from tests.comm.fake_cuda import FakeStream, _OnStream, install
from tests.ranks import run_on_ranks

GPU = torch.device("cuda", 0)


def leave_by_deadline(rank: int, urgent_first: bool) -> list[str]:
    """Streams that are each free to begin at once; what they did, in order."""
    main, gate, let_go = install(), Gate(), threading.Event()
    done: list[str] = []

    def job(name: str, *, slow: bool = False) -> Any:
        def do() -> None:
            if slow:
                let_go.wait()
            done.append(name)

        return lambda: _OnStream.current[-1].give(do)

    total = QueuedSums(SimpleNamespace(), gate, GPU)  # type: ignore[arg-type]

    def add_up(transport: Any, values: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: job("dense gradients")() or values)

    dense_gradients.start_all_reduce = add_up
    urgent, bulk = SideStream(GPU, gate=gate, urgent=True), SideStream(GPU, gate=gate)
    rows = job("OL rows", slow=True)
    if urgent_first:
        urgent.submit(rows)
    wait = total.start(torch.zeros(3))
    total.finish()
    sent = bulk.submit(job("NOL gradients"))
    if not urgent_first:
        urgent.submit(rows)
    main.give(lambda: done.append("compute"))
    main.synchronize()
    time.sleep(0.05)
    let_go.set()
    wait()
    sent.wait()
    main.synchronize()
    bulk._stream.synchronize(), urgent._stream.synchronize()
    return done


@pytest.mark.parametrize(
    ("urgent_first", "order"),
    [
        (True, ["dense gradients", "OL rows", "NOL gradients"]),
        (False, ["dense gradients", "NOL gradients", "OL rows"]),
    ],
    ids=["urgent traffic passes", "nobody waits for what comes later"],
)
def test_streams_let_more_urgent_traffic_pass(urgent_first: bool, order: list[str]) -> None:
    """Dense sums of a postponed step shared their link with gradients that had a whole step's time.

    They and overlapped rows are both needed where the next forward begins: one behind the other took 1 ms longer.
    """
    ((*done,),) = run_on_ranks(leave_by_deadline, 1, urgent_first)
    assert [one for one in done if one in order] == order
    assert "compute" in done


def leave_before_all_have_sent(rank: int) -> tuple[list[str], list[str]]:
    """What a rank has sent of two sums while others have sent nothing of the first, and in the end."""
    main, leaving, others_sent = install(), FakeStream(), threading.Event()
    done: list[str] = []

    def current() -> FakeStream:
        return _OnStream.current[-1] if _OnStream.current else main

    def add_up(transport: Any, values: torch.Tensor) -> Any:
        number = int(values[0])
        leaving.wait_stream(current())
        leaving.give(lambda: done.append(f"parts of {number}"))

        def wait() -> torch.Tensor:
            current().give(others_sent.wait)
            leaving.wait_stream(current())
            leaving.give(lambda: done.append(f"sum of {number}"))
            current().wait_stream(leaving)
            return values

        return SimpleNamespace(wait=wait)

    dense_gradients.start_all_reduce = add_up
    total = QueuedSums(SimpleNamespace(), Gate(), GPU)  # type: ignore[arg-type]
    waits = [total.start(torch.tensor([float(number)])) for number in (1, 2, 3)]
    deadline = time.monotonic() + 20
    while len(done) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    before = list(done)
    waits[2]()
    others_sent.set()
    main.synchronize()
    return before, done


def test_parts_of_the_next_sum_leave_while_one_waits_for_other_ranks() -> None:
    """One whole sum behind the other took 2 ms each, of 7 whose first ones are needed where the forward begins."""
    ((before, done),) = run_on_ranks(leave_before_all_have_sent, 1)
    assert before == ["parts of 1", "parts of 2"]
    assert done == ["parts of 1", "parts of 2", "sum of 1", "parts of 3", "sum of 2", "sum of 3"]


def pick_on(rank: int) -> list[str]:
    """Which stream picks gradients that the next batch depends on, and which one sends them."""
    install()
    told: list[str] = []

    def tell(what: str) -> None:
        told.append(f"{what} on {'its own stream' if _OnStream.current else 'the one that computes'}")

    moves: Any = SimpleNamespace(
        pick_urgent=lambda flight, lookups: tell("picked") or UrgentGradients([], [], {}),
        send_urgent=lambda flight, picked, lr, beside: tell("sent") or picked.left,
        fetch_late=lambda flight, storage, beside: tell("fetched"),
    )
    done = SimpleNamespace(wait=lambda: {})
    flight: Any = SimpleNamespace(step=0, ids=done, early=done, copied_by=lambda other: None)
    UrgentChain(moves, device=GPU, gate=Gate()).start(flight, flight, {}, lr=0.1)
    return told


def test_urgent_gradients_are_picked_ahead_of_weight_gradients() -> None:
    """On a stream of their own they began when a first product of these was over, 0.4 to 1.1 ms later."""
    (told,) = run_on_ranks(pick_on, 1)
    assert told == ["picked on the one that computes", "sent on its own stream", "fetched on its own stream"]


def test_only_what_is_more_urgent_is_waited_for() -> None:
    gate, waited = Gate(), []
    stream: Any = SimpleNamespace(wait_event=waited.append)
    for deadline in Deadline:
        gate.queued(deadline, deadline.name)  # type: ignore[arg-type]
    gate.queued(Deadline.OL_ROWS, "those of the next step")  # type: ignore[arg-type]
    gate.hold(Deadline.OL_GRADIENTS, stream)
    assert waited == []
    gate.hold(Deadline.DENSE_GRADIENTS, stream)
    assert waited == ["OL_GRADIENTS", "those of the next step"]
