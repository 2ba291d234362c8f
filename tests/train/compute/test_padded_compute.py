"""Which sizes are recorded, when, and what is told of steps that are not replayed; the recordings are made up."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import pytest
import torch

from freescale.kernels import SequenceLayout
from freescale.kernels.runtime import postponed as postponed_gradients
from freescale.pipeline import Padder, PaddingSizes
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute import recorder
from freescale.train.compute.late_update import BEFORE, LateUpdate, Piece
from freescale.train.compute.padded_compute import PaddedCompute
from freescale.train.compute.postponed_pieces import DensePiece, PostponedPieces
from freescale.train.compute.recorder import CutGraph, Memory, Recorder
from tests.pipeline.padding.test_padder import DIM, LONGEST, indexed, make_batch, make_model

CPU = torch.device("cpu")
SIZES = PaddingSizes(tokens=(64, 96, 160), samples=8, rows={"item": 31})


class MadeUp(Recorder):
    """Records nothing, and says it has."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.on = True
        self.count = 0

    on = True  # type: ignore[assignment]

    def record(self, work):
        self.count += 1
        return self

    def replay(self) -> None:
        """Nothing was recorded."""


class Steps:
    """Batches of some lengths, and whether they would be replayed."""

    def __init__(self, sizes=SIZES, **options):
        self.padder = Padder(CPU, longest=LONGEST, table_rows={"item": 30}, sizes=sizes)
        self.padder._wishes.note("device_offsets")
        model = make_model()
        self.recorder = MadeUp()
        self.compute = PaddedCompute(
            model, list(model.parameters()), precision=nullcontext, recorder=self.recorder, **options
        )
        self.draws = np.random.default_rng(1)

    def pad(self, *lengths):
        batch = make_batch(lengths, self.draws)
        unique, with_index = indexed(batch)
        return self.padder.pad(with_index, {"item": unique}, global_tokens=9)

    def take(self, *lengths, padded=None):
        padded = padded or self.pad(*lengths)
        replayed = self.compute.recordings.will_replay(padded)
        self.compute.run({"item": torch.randn(padded.real_rows["item"], DIM, dtype=torch.float64)}, padded)
        return replayed


def test_all_foreseen_sizes_are_recorded_with_the_first_of_them():
    steps = Steps()
    assert not steps.take(20, 20)
    assert steps.take(20, 30)
    assert steps.recorder.count == 3
    assert all(steps.take(*lengths) for lengths in [(40, 40, 10), (40, 40, 40, 39), (1,), (40, 40, 40)])
    assert steps.recorder.count == 3
    assert (
        steps.compute.recordings.story()
        == "5 of 6 batches replayed from 3 recordings; not replayed: 1 the first step"
    )


def test_the_largest_of_them_comes_first(monkeypatch):
    """Behind a smaller one it took memory of its own: 8.1 GiB for all on ranks with 17, and steps ran out of it."""
    steps, sizes = Steps(), []
    monkeypatch.setattr(steps.recorder, "try_out", lambda work, size, shrink: sizes.append(size) or True)
    steps.take(20), steps.take(20)
    assert sizes == [160, 96, 64]


def test_another_size_is_recorded_when_it_is_met_again():
    steps = Steps()
    steps.take(20), steps.take(20)
    large = (40, 40, 40, 40, 40)
    assert not steps.take(*large)
    assert steps.take(*large)
    assert "1 of a size that was not foreseen" in steps.compute.recordings.story()
    other = Steps(PaddingSizes())
    assert [other.take(20, 20) for _ in range(4)] == [False, False, True, True]


def test_a_size_that_cannot_be_recorded_is_computed_as_usual_and_counted(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(steps.recorder, "record", lambda work: None)
    assert not any(steps.take(20, 20) for _ in range(3))
    assert "2 that could not be recorded" in steps.compute.recordings.story()


def test_batches_made_before_all_lists_were_known_are_computed_as_usual():
    steps = Steps()
    early = [steps.pad(20, 20), steps.pad(30)]
    steps.take(padded=early[0])
    steps.padder._wishes.note("by_length")
    assert not steps.take(padded=early[1])
    assert steps.recorder.count == 0
    assert steps.take(30)
    assert steps.recorder.count == 3
    assert "1 made ready before all was known that its kernels read" in steps.compute.recordings.story()


def test_a_batch_made_before_its_parcel_had_grown_is_computed_as_usual():
    """It has the key of the recording, but not all of it is in its parcel: the copy failed in the fifth step."""
    steps = Steps()
    early = []
    for lengths in ((20, 20), (30,)):
        steps.padder._wishes.parcel_bytes = 256
        early.append(steps.pad(*lengths))
    assert not any(one.in_one_piece for one in early)
    steps.take(padded=early[0])
    assert steps.take(30)
    assert not steps.take(padded=early[1])
    assert "1 too large for one copy" in steps.compute.recordings.story()


def test_the_parts_of_a_batch_that_fit_make_the_smaller_sizes():
    padded = Steps().pad(40, 5, 30, 0, 11)
    made = list(padded.foreseen())
    assert [one.views.layout.num_tokens for one in made] == [160, 96, 64]
    assert [one.views.layout.lengths.tolist()[:5] for one in made] == [
        [40, 5, 30, 0, 11],
        [40, 5, 30, 0, 11],
        [40, 5, 0, 0, 0],
    ]
    assert all(one.num_rows == {"item": 31} and len(one.views.layout.lengths) == 8 for one in made)
    for one in made:
        real = one.views.layout.num_real
        assert torch.equal(
            one.views.batch.tokens["item_index"][:real], padded.views.batch.tokens["item_index"][:real]
        )
        assert (one.views.batch.tokens["item_index"][real:] == 30).all()


GIB = 2**30


class Full(Recorder):
    """A GPU with so much memory left, on which any work takes 4 GiB, and something before it took 20."""

    def __init__(self, monkeypatch, available, *, works=True):
        self.told, self.peak, self.worked, self.works = [], 20 * GIB, 0, works
        self.takes = 4 * GIB
        super().__init__(CPU, tell=self.told.append)
        self._on_gpu = True
        monkeypatch.setattr(recorder, "memory_of", lambda device: Memory(GIB, self.peak, available))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", 0))

    def work(self):
        if not self.works:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.worked += 1
        self.peak = max(self.peak, GIB + self.takes)


def test_there_is_room_for_recordings_beside_steps_as_usual(monkeypatch):
    made = Full(monkeypatch, 60 * GIB)
    assert made.try_out(made.work, size=100)
    assert made.on
    assert made.worked == 1
    tight = Full(monkeypatch, 10 * GIB)
    assert tight.try_out(tight.work, size=100), "the peak was older"
    assert tight.on
    assert tight.worked == 2
    assert tight.try_out(tight.work, size=90)
    assert tight.worked == 3, "what is smaller has room"
    tight.takes = 6 * GIB
    assert not tight.try_out(tight.work, size=110), "what is larger is asked again"
    assert not tight.on


@pytest.mark.parametrize(
    ("works", "found"),
    [(True, "4.0 GiB a step, and 9.0 GiB were left"), (False, "CUDA out of memory")],
)
def test_where_there_is_none_nothing_is_recorded_and_that_is_told(monkeypatch, works, found):
    """A run that trained with more than half of a GPU's memory would end in its third step."""
    made = Full(monkeypatch, 9 * GIB, works=works)
    assert not made.try_out(made.work, size=100)
    assert not made.on
    (told,) = made.told
    assert "too much memory" in told
    assert found in told


def test_work_that_can_take_less_is_tried_again(monkeypatch):
    made, sizes = Full(monkeypatch, 9 * GIB), [3 * GIB]

    def shrink():
        made.takes = sizes.pop() if sizes else made.takes
        return made.takes == 3 * GIB

    assert made.try_out(made.work, size=100, shrink=shrink)
    assert made.on
    assert made.told == []
    made.takes = 5 * GIB
    assert not made.try_out(made.work, size=110, shrink=shrink), "it cannot"
    assert not made.on


def test_where_recordings_have_no_room_less_is_postponed(monkeypatch):
    steps = Steps(postpone_bytes=1 << 30)
    steps.take(20)
    postponed = steps.compute.later.postponed
    bounds = []

    def try_out(work, size, shrink):
        while True:
            work()
            bounds.append(postponed.most_bytes)
            if not shrink():
                return False

    monkeypatch.setattr(postponed_gradients, "_LEAST", postponed.most_kept_bytes // 2)
    monkeypatch.setattr(steps.recorder, "try_out", try_out)
    steps.take(20)
    assert bounds[0] == 1 << 30
    assert len(set(bounds)) > 2
    assert bounds == sorted(bounds, reverse=True), "less every time"
    assert postponed.most_kept_bytes == 0, "there was no room at all"
    assert postponed.wanted_bytes == 1 << 30


def test_a_recorder_without_room_leaves_steps_as_they_were(monkeypatch):
    steps = Steps()
    monkeypatch.setattr(steps.recorder, "try_out", lambda work, size, shrink: False)
    assert not any(steps.take(20, 30) for _ in range(4))
    assert steps.recorder.count == 0
    assert "could not be recorded" in steps.compute.recordings.story()


class Doing(MadeUp):
    """Does what it records."""

    def record(self, work):
        work()
        return super().record(work)


def gradients_of(padded, rows, kind, *, recorder=None, **later):
    """Of one batch, computed as usual or as it is recorded: rows, all others, and the pieces they were told in."""
    model = make_model(kind)
    compute = PaddedCompute(
        model, list(model.parameters()), precision=nullcontext, recorder=recorder or MadeUp(), **later
    )
    _, grads = compute.run({"item": rows}, padded)
    told: list[DensePiece] = []
    if later:
        compute.compute_later(told.append)
    assert all(param.grad is not None for param in model.parameters())
    return compute, grads["item"].clone(), compute.flat.clone(), told


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
@pytest.mark.parametrize(("most", "piece"), [(1 << 30, 2000), (1 << 30, None), (20_000, 2000), (0, 1)])
def test_gradients_that_are_put_off_have_the_bits_of_all_at_once(kind, most, piece):
    steps = Steps()
    padded = steps.pad(20, 0, 31)
    rows = torch.randn(padded.real_rows["item"], DIM, dtype=torch.float64)
    _, plain_rows, plain, _ = gradients_of(padded, rows, kind)
    compute, own_rows, own, told = gradients_of(padded, rows, kind, postpone_bytes=most, piece_bytes=piece)
    assert torch.equal(own_rows, plain_rows)
    assert torch.equal(own, plain)
    numbers = torch.cat([piece.values for piece in told])
    assert torch.equal(numbers, plain), "every number in one piece, in their order"
    assert (len(told) == 1) == (piece is None)
    assert (compute.later.postponed.num_postponed > 0) == (most > 0)
    assert compute.later.postponed.most_kept_bytes <= most
    assert not compute.later.postponed.waiting


@pytest.fixture
def unsealed(monkeypatch):
    """On a CPU layouts bring some of their lists along when they are asked for."""
    monkeypatch.setattr(SequenceLayout, "seal", lambda layout: None)


@pytest.mark.usefixtures("unsealed")
def test_what_is_put_off_is_recorded_in_pieces():
    steps = Steps()
    made = Doing()
    rows = torch.randn(30, DIM, dtype=torch.float64)
    model = make_model()
    compute = PaddedCompute(
        *(model, list(model.parameters())),
        precision=nullcontext,
        recorder=made,
        postpone_bytes=1 << 30,
        piece_bytes=2000,
    )
    told: list[DensePiece] = []
    for expected in (False, True, True):
        padded = steps.pad(20, 30)
        assert compute.recordings.will_replay(padded) == expected
        compute.run({"item": rows[: padded.real_rows["item"]]}, padded)
        told.clear()
        compute.compute_later(told.append)
        assert told == compute.later.pieces
    graphs = [
        [graph for graph, _ in each.later if graph is not None] for each in compute.recordings.made.values()
    ]
    assert len(graphs) == 3
    assert len(graphs[0]) >= 3
    assert made.count == sum(1 + len(each) for each in graphs)


@pytest.mark.usefixtures("unsealed")
def test_a_piece_that_cannot_be_recorded_leaves_nothing_behind():
    class Breaks(Doing):
        def record(self, work):
            return None if self.count == 2 else super().record(work)

    steps = Steps()
    padded = steps.pad(20, 30)
    rows = torch.randn(padded.real_rows["item"], DIM, dtype=torch.float64)
    _, _, plain, _ = gradients_of(padded, rows, "hstu")
    model = make_model()
    compute = PaddedCompute(
        *(model, list(model.parameters())),
        precision=nullcontext,
        recorder=Breaks(),
        postpone_bytes=1 << 30,
        piece_bytes=2000,
    )
    for _ in range(2):
        assert not compute.recordings.will_replay(padded)
        compute.run({"item": rows}, padded)
        compute.compute_later(lambda piece: None)
        assert torch.equal(compute.flat, plain)
    assert not compute.recordings.made


class Cuts(Doing):
    """Does what it records, notes where it is cut, and when its pieces are replayed."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def record_in_pieces(self, work):
        numbers = [None]
        work(numbers.append)
        self.count += len(numbers)
        return [CutGraph(number, Replayed(self.seen, f"graph {number}")) for number in numbers]


class Replayed:
    """In the place of a graph."""

    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def replay(self):
        self.seen.append(self.name)


@pytest.mark.usefixtures("unsealed")
@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_a_replay_stops_before_each_layer_whose_weights_are_still_on_their_way(kind):
    seen: list[str] = []
    steps, model = Steps(), make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    late = LateUpdate(model, optimizer, timer=StepTimer(CPU))
    own = sorted(model.parameters(), key=lambda param: late.layer_of([param]))
    compute = PaddedCompute(
        *(model, own),
        precision=nullcontext,
        recorder=Cuts(seen),
        postpone_bytes=1 << 30,
        piece_bytes=3000,
        late=late,
    )
    layers = [late.layer_of(piece.params) for piece in compute.later.pieces]
    assert layers == sorted(layers)
    assert set(layers) >= {0, 1}
    for _ in range(3):
        padded = steps.pad(20, 30)
        replays = compute.recordings.will_replay(padded)
        seen.clear()
        compute.run({"item": torch.randn(padded.real_rows["item"], DIM, dtype=torch.float64)}, padded)
        under_way: list[DensePiece] = []
        compute.compute_later(under_way.append)
        for piece in under_way:
            wait = partial(seen.append, f"wait {late.layer_of(piece.params)}")
            late.leave(Piece(piece.params, piece.values, wait, None, piece.places), lr=0.01)
    assert replays
    told = [entry for entry, _ in groupby(seen)]
    before = ["wait -1"] if BEFORE in layers else []
    assert told == [*before, "graph None", "wait 0", "graph 0", "wait 1", "graph 1"]


@pytest.mark.usefixtures("unsealed")
def test_what_a_try_has_left_when_memory_was_full_is_not_added_to_the_next_batch(monkeypatch):
    """The closures of its backward stayed, and the gradients of upper layers came out doubled."""
    steps = Steps()
    padded = steps.pad(20, 30)
    rows = torch.randn(padded.real_rows["item"], DIM, dtype=torch.float64)
    _, _, plain, _ = gradients_of(padded, rows, "hstu")
    model, made = make_model(), Doing()
    made._on_gpu = True
    compute = PaddedCompute(
        *(model, list(model.parameters())), precision=nullcontext, recorder=made, postpone_bytes=1 << 30
    )
    monkeypatch.setattr(recorder, "memory_of", lambda device: Memory(0, 0, GIB))
    groups = PostponedPieces.groups
    for full in (False, True):
        monkeypatch.setattr(PostponedPieces, "groups", run_out if full else groups)
        assert not compute.recordings.will_replay(padded)
        monkeypatch.setattr(PostponedPieces, "groups", groups)
        compute.run({"item": rows}, padded)
        compute.compute_later(lambda piece: None)
        assert torch.equal(compute.flat, plain)
    assert not compute.recordings.made


def run_out(self, direct):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_batch_whose_lists_have_no_fixed_size_is_never_recorded():
    """Others of its key may have more pairs than its recording has room for."""
    steps = Steps()
    loose = [replace(steps.pad(20, 30), fixed=False) for _ in range(4)]
    assert not any(steps.take(padded=one) for one in loose)
    assert "3 with more pairs of tokens than gradients are kept for" in steps.compute.recordings.story()
    assert not steps.compute.recordings._met
    assert steps.take(20, 30)
    assert not steps.take(padded=loose[0]), "nor does it take the place of one that is"


def test_nothing_more_is_recorded_once_memory_was_found_short(monkeypatch):
    steps = Steps()
    tried = []

    def try_out(work, size, shrink):
        tried.append(size)
        steps.recorder.on = len(tried) < 2
        return steps.recorder.on

    monkeypatch.setattr(steps.recorder, "try_out", try_out)
    steps.take(20, 30), steps.take(20, 30)
    assert len(tried) == 2
    assert steps.recorder.count == 1
