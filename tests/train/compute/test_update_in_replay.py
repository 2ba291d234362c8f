"""A recorded forward updates each layer where it gets there: the bits of updates between its graphs, and none too many.

A graph runs from one cut to the next. Here that is a thread that computes the step once more and stands at every cut
until the next graph is replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freescale.kernels import SequenceLayout
from freescale.model.encoders.hstu import HSTU
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.late_update import BEFORE, LateUpdate, Piece
from freescale.train.compute.padded_compute import PaddedCompute
from freescale.train.compute.postponed_pieces import DensePiece
from freescale.train.compute.recorder import CutGraph, Recorder
from freescale.train.compute.update_if_due import UpdateIfDue
from tests.pipeline.padding.test_padder import DIM, make_model
from tests.train.compute.test_padded_compute import CPU, Steps

pytestmark = pytest.mark.usefixtures("unsealed")


@pytest.fixture
def unsealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU layouts bring some of their lists along when they are asked for."""
    monkeypatch.setattr(SequenceLayout, "seal", lambda layout: None)


class Standing:
    """A thread that does some work and stands at each of its cuts."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self.numbers: list[int] = []
        self.error: BaseException | None = None
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def go(self) -> None:
        """Up to the next cut."""
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._stands.acquire()
        if self.error is not None:
            raise self.error

    def _run(self, work: Callable[[Callable[[int], None]], None]) -> None:
        try:
            self._go.acquire()
            work(self._cut)
        except BaseException as error:  # told by `go`
            self.error = error
        self._stands.release()

    def _cut(self, number: int) -> None:
        self.numbers.append(number)
        self._stands.release()
        self._go.acquire()


class Part:
    """In the place of a graph."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


class Parts(Recorder):
    """Records work as what does it again, part by part."""

    on = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(CPU)
        self.after: Callable[[], object] = lambda: None

    def record(self, work: Callable[[], None]) -> Any:
        """Whatever it was, again."""
        work()
        return Part(work)

    def record_in_pieces(self, work: Callable[[Callable[[int], None]], None]) -> Any:
        """The same, cut where it says so."""
        numbers: list[int | None] = [None]
        work(numbers.append)
        running: list[Standing] = []

        def whole(cut: Callable[[int], None]) -> None:
            work(cut)
            self.after()

        def first() -> None:
            running[:] = [Standing(whole)]
            running[0].go()

        return [
            CutGraph(number, Part(first if number is None else self._next(running))) for number in numbers
        ]  # type: ignore[arg-type]

    def _next(self, running: list[Standing]) -> Callable[[], None]:
        return lambda: running[0].go()


class Training:
    """Steps of one padded batch on one rank, whose updates wait for the next forward, or for nobody."""

    def __init__(
        self, kind: str, *, late: bool, replayed: bool = False, fused: bool = True, piece_bytes: int = 3000
    ) -> None:
        torch.manual_seed(0)
        self.model = make_model(kind)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.1, fused=fused
        )
        self.late = LateUpdate(self.model, self.optimizer, timer=StepTimer(CPU)) if late else None
        order = LateUpdate(self.model, self.optimizer, timer=StepTimer(CPU))
        self.compute = PaddedCompute(
            self.model,
            sorted(self.model.parameters(), key=lambda param: order.layer_of([param])),
            precision=nullcontext,
            recorder=Parts(),
            postpone_bytes=1 << 30,
            piece_bytes=piece_bytes,
            late=self.late,
        )
        # What is put off is made by the host anew in every forward, which a graph does not need.
        self.compute._recorder.after = lambda: self.compute.later.groups(self.compute._gradients.direct)
        self.replayed = replayed
        self.padded = Steps().pad(20, 30)
        self.draw = torch.Generator().manual_seed(3)
        self.seen: list[str] = []

    def step(self) -> float:
        """Its loss."""
        if self.replayed:
            self.compute.recordings.will_replay(self.padded)
        size = (self.padded.real_rows["item"], DIM)
        rows = torch.randn(size, dtype=torch.float64, generator=self.draw)
        loss, _ = self.compute.run({"item": rows}, self.padded)
        found = float(loss)
        self.seen.append("step")
        under_way: list[DensePiece] = []
        self.compute.compute_later(under_way.append)
        if self.late is None:
            self.optimizer.step()
            return found
        for piece in under_way:
            used = [
                (param, place) for param, place in zip(piece.params, piece.places) if param.grad is not None
            ]
            if not used:
                continue
            layer, params = self.late.layer_of(piece.params), [param for param, _ in used]
            wait = partial(self.seen.append, f"wait {layer}")
            self.late.leave(
                Piece(params, piece.values, wait, None, [place for _, place in used]),
                lr=self.optimizer.param_groups[0]["lr"],
                layer=layer,
            )
        return found

    def learnt(self) -> list[Tensor]:
        """Weights, moments and counts of updates."""
        if self.late is not None:
            self.late.settle()
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        moments = [state[name] for state in states if state for name in ("step", "exp_avg", "exp_avg_sq")]
        return [each.detach().clone() for each in (*self.model.parameters(), *moments)]


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_replays_that_update_layers_learn_the_bits_of_the_plain_order(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    between: list[Any] = []
    update = LateUpdate._step
    monkeypatch.setattr(LateUpdate, "_step", lambda self, due: (between.append(due), update(self, due)))
    plain, ours = Training(kind, late=False), Training(kind, late=True, replayed=True)
    for number in range(7):
        assert ours.step() == plain.step()
        if number == 2:
            between.clear()
            ours.seen.clear()
        if number == 4:  # somebody looks at the weights: the next replay has nothing to update
            assert not between, "replays do it themselves"
            waits = [entry for entry in ours.seen if entry != "step"]
            assert set(waits) == {f"wait {layer}" for layer in (BEFORE, 0, 1)}
            assert waits[: len(waits) // 2] == sorted(
                waits[: len(waits) // 2], key=lambda each: int(each[5:])
            )
            assert_same(ours.learnt(), plain.learnt())
            assert between
    assert ours.compute.recordings.share() > 0.8
    assert_same(ours.learnt(), plain.learnt())


def called(*calls: tuple[str, int]) -> Callable[..., Tensor]:
    """In the place of `HSTU._through`: layers are called in this way."""

    def through(self: HSTU, x: Tensor, view: Any) -> Tensor:
        for how, number in calls:
            layer = self.layers[number]
            x = layer(x, view, number) if how == "heard" else layer.forward(x, view, number)
        return x

    return through


@pytest.mark.parametrize(
    "calls",
    [
        [("heard", 0), ("heard", 1), ("heard", 1)],
        [("heard", 0), ("unheard", 1)],
        [("heard", 1)],
        [("unheard", 1), ("heard", 0)],
        [("heard", 1), ("heard", 0)],
    ],
    ids=["twice", "unheard", "one left out", "unheard, in another order", "in another order"],
)
@pytest.mark.parametrize("piece_bytes", [3000, 5000])
def test_layers_called_in_any_way_are_updated_once(
    calls: list[tuple[str, int]], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, past its hooks, or not at all while it shares a piece with one that is: what replays leave is settled."""
    monkeypatch.setattr(HSTU, "_through", called(*calls))
    plain, ours = (
        Training("hstu", late=False),
        Training("hstu", late=True, replayed=True, piece_bytes=piece_bytes),
    )
    assert [ours.step() for _ in range(6)] == [plain.step() for _ in range(6)]
    assert_same(ours.learnt(), plain.learnt())
    heard = all(how == "heard" for how, _ in calls)
    for each in ours.compute.recordings.made.values():
        assert heard or each.updates is None or piece_bytes == 5000, "all of them, or none"


def test_weights_without_moments_are_updated_between_graphs() -> None:
    """A recording would make them, and every replay anew; other sizes would fail for the same reason."""
    plain, ours = Training("hstu", late=False), Training("hstu", late=True, replayed=True)
    asked = ours.late.can_record
    ours.late.can_record = lambda params: ours.compute.recordings.made and asked(params)
    assert [ours.step() for _ in range(5)] == [plain.step() for _ in range(5)]
    found = [bool(each.updates) for each in ours.compute.recordings.made.values()]
    assert found[0] is False
    assert_same(ours.learnt(), plain.learnt())


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_an_optimizer_that_cannot_leave_an_update_out_updates_between_graphs() -> None:
    plain, ours = (
        Training("hstu", late=False, fused=False),
        Training("hstu", late=True, replayed=True, fused=False),
    )
    assert not ours.late.can_record([])
    assert [ours.step() for _ in range(4)] == [plain.step() for _ in range(4)]
    assert not any(each.updates for each in ours.compute.recordings.made.values())
    assert_same(ours.learnt(), plain.learnt())


def test_where_other_weights_were_left_all_are_updated_before_the_replay() -> None:
    """A step whose loss does not depend on a weight leaves it out; what was recorded updates it."""
    plain, ours = Training("hstu", late=False), Training("hstu", late=True, replayed=True)
    for _ in range(3):
        assert ours.step() == plain.step()
    left = ours.late._travelling
    dropped = left.pop()
    alone = {id(param) for param in dropped.piece.params}
    before = [param.detach().clone() for param in dropped.piece.params]
    ours.seen.clear()
    ours.step()
    assert ours.seen[ours.seen.index("step") - 1].startswith("wait")
    assert all(torch.equal(one, param) for one, param in zip(before, dropped.piece.params, strict=True))
    assert alone <= set().union(*(each.updates for each in ours.compute.recordings.made.values()))


def test_an_update_that_is_not_due_moves_nothing() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    update = UpdateIfDue(optimizer)
    gradients = {weights[0]: torch.ones(3)}
    assert not update.knows(gradients)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    before = snapshot(optimizer)

    def run() -> None:
        update.count(gradients)
        update.run(gradients)

    run()
    assert_same(snapshot(optimizer), before)
    update.tell(True)
    run()
    moved = [not torch.equal(one, other) for one, other in zip(snapshot(optimizer), before, strict=True)]
    assert moved == [True] * 4 + [False] * 4
    assert all(torch.equal(weight.grad, torch.ones(3)) for weight in weights), "what others left stays"
    update.tell(False)
    before = snapshot(optimizer)
    run()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize(
    "how", [{"fused": False}, {"fused": True, "amsgrad": True}, {"fused": True, "maximize": True}]
)
def test_other_optimizers_cannot_leave_an_update_out(how: dict[str, bool]) -> None:
    weights = [nn.Parameter(torch.ones(3))]
    assert not UpdateIfDue(torch.optim.AdamW(weights, **how)).possible
    assert not UpdateIfDue(torch.optim.Adam(weights, fused=True)).possible
    assert not UpdateIfDue(torch.optim.SGD(weights)).possible
    assert UpdateIfDue(torch.optim.AdamW(weights, fused=True)).possible


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """By weight: itself, how often it was updated, and its moments."""

    def each() -> Iterator[Tensor]:
        for param in optimizer.param_groups[0]["params"]:
            state = optimizer.state[param]
            yield from (param, state["step"], state["exp_avg"], state["exp_avg_sq"])

    return [tensor.detach().clone() for tensor in each()]
