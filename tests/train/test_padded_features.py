"""Padded batches with features, whatever the schema: the step of the batch alone, whatever stands in pads."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.data import FIRST, SLOT
from freescale.pipeline import PaddedBatch
from freescale.recipe import assembly, build_run, load_config
from freescale.train.log.events import Progress
from freescale.train.loop import take_steps
from freescale.train.run import Run
from freescale.train.state.run_state import run_tensors
from tests.effort import examples
from tests.feature_source import DictSource
from tests.padded_runs import padded_capture
from tests.small_run import SMALL, Recorder, make_run, these_ranks
from tests.test_feature_model import RECIPE, sources

MOVING = ("optim.lr=0.01", "optim.clip_norm=0.5", "embedding.optimizer=rowwise_adagrad")
EVERY = (
    "synthetic.features=true", "tables.item.dim=10", "tables.genre.dim=5", "tables.genre.optimizer=sgd",
    "tables.genre.lr=0.05", "tables.home.dim=7", "tables.home.optimizer=rowwise_adagrad",
    "tables.hour.replicate_below_mb=1", "model.dtype=float64", "run.eval_every=0", "data.global_batch=10",
)  # fmt: skip
"""All kinds but vectors, tables of several widths and optimizers, a user's country in front."""


def run_of(source: DictSource, *keys: str, padded: bool) -> Run:
    config = load_config(None, [*SMALL, *RECIPE, *keys])
    with patch.object(assembly, "build_capture", padded_capture) if padded else patch.dict({}):
        return build_run(config, source, these_ranks(), Progress([Recorder()]))


def after_one_step(run: Run, poisoned: bool = False) -> dict[str, Any]:
    """Loss, gradients of weights, and all that a step changes."""
    with run.open_schedule(0) as schedule:
        ready = next(iter(schedule))
        if poisoned:
            poison(ready.padded)
        loss = run.train_step.run(ready, schedule).loss
        run.state.embedding.wait_for_updates()
    grads = {name: param.grad for name, param in run.state.model.named_parameters()}
    return {"loss": loss, "grads": grads, "tensors": run_tensors(run)}


def poison(padded: PaddedBatch | None) -> None:
    """Other numbers, ids and items where there are no tokens, sequences or items."""
    assert padded is not None
    for part in padded.parts:
        batch, layout = part.views.batch, part.views.layout
        real_items = 1 + max(
            int(index.max(initial=0))
            for index in (
                batch.tokens["item_index"][: layout.num_real].numpy(),
                batch.tokens["target_index"][: layout.num_real].numpy(),
                batch.samples["negative_index"][: len(layout.lengths.nonzero()[0])].numpy(),
            )
        )
        ends = {"tokens": layout.num_real, "items": real_items}
        for domain, end in ends.items():
            for name, values in getattr(batch, domain).items():
                if name.endswith(SLOT):
                    values[end:] = FIRST
                elif values.is_floating_point():
                    values[end:] = 1e3
                elif name == "item_index":
                    values[end:] = 0
                elif "time" in name:
                    values[end:] = -(2**62)
        unused = torch.from_numpy(layout.lengths == 0)
        for name, values in batch.samples.items():
            if name.endswith(SLOT):
                values[unused] = FIRST


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], *, rtol: float = 1e-9) -> None:
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=rtol)
    for name, want in theirs["grads"].items():
        got, nothing = ours["grads"][name], torch.zeros(1, dtype=torch.float64)
        if got is None or want is None:
            assert not any(each is not None and each.any() for each in (got, want)), name
            got = want = nothing
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-12, msg=name)
    for name, want in theirs["tensors"].items():
        torch.testing.assert_close(ours["tensors"][name], want, rtol=rtol, atol=1e-12, msg=name)


@examples(8, 300)
@given(
    sources(),
    st.sampled_from(["sum", "mlp"]),
    st.sampled_from(["hstu", "sasrec", "llama"]),
    st.sampled_from([1, 2]),
)
def test_a_padded_step_is_that_of_the_batch_alone(
    source: DictSource, how: str, kind: str, parts: int
) -> None:
    # Rows move by their gradients; weights do not: Adam makes a step even of a gradient that is rounding alone.
    keys = (f"tokens.join={how}", f"model.kind={kind}", f"optim.accumulate={parts}", "optim.clip_norm=0.5")
    plain, padded = (after_one_step(run_of(source, *keys, padded=each)) for each in (False, True))
    assert_same(padded, plain)


@examples(4, 100)
@given(sources(), st.sampled_from(["sum", "mlp"]), st.sampled_from([1, 2]))
def test_what_stands_in_pads_changes_no_bit(source: DictSource, how: str, parts: int) -> None:
    keys = (f"tokens.join={how}", f"optim.accumulate={parts}", *MOVING)
    run = run_of(source, *keys, padded=True)
    clean = after_one_step(run)
    if run.state.model.items is None:
        return  # nothing but items: tests/pipeline/padding/test_padder.py
    poisoned = after_one_step(run_of(source, *keys, padded=True), poisoned=True)
    assert clean["loss"] == poisoned["loss"]
    for name, tensor in clean["tensors"].items():
        assert torch.equal(tensor, poisoned["tensors"][name]), name


def trained(*keys: str, padded: bool, steps: int = 6) -> tuple[Run, dict[str, Any]]:
    with patch.object(assembly, "build_capture", padded_capture) if padded else patch.dict({}):
        run, heard = make_run((*EVERY, f"run.steps={steps}", *keys))
    with run.open_schedule(0) as schedule:
        take_steps(run, schedule)
    losses = [step["loss"] for step in heard.of("step")]
    return run, {"loss": losses, "grads": {}, "tensors": run_tensors(run)}


@pytest.mark.parametrize(
    "keys",
    [
        ("model.dropout=0.3", "data.workers=1"),
        ("optim.accumulate=2", "optim.clip_norm=0.5", "pipeline.ahead=true"),
    ],
)
def test_a_padded_run_follows_the_curve_of_a_plain_one(keys: tuple[str, ...]) -> None:
    assert_same(*(trained(*keys, padded=each)[1] for each in (True, False)))


@pytest.mark.filterwarnings("ignore")
def test_unwritten_memory_changes_nothing() -> None:
    _, plain = trained("tokens.join=mlp", padded=True, steps=4)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what nobody has written with NaN
    try:
        assert torch.empty(3).isnan().all()
        _, poisoned = trained("tokens.join=mlp", padded=True, steps=4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain["loss"] == poisoned["loss"]
    assert all(torch.equal(each, poisoned["tensors"][name]) for name, each in plain["tensors"].items())


@pytest.mark.parametrize("parts", [1, 2])
def test_behind_the_rows_of_a_batch_stand_zeros(parts: int) -> None:
    """Where rows are projected, products read all of them: what an earlier batch has left must not be there."""
    with patch.object(assembly, "build_capture", padded_capture):
        run, _ = make_run((*EVERY, "run.steps=6", f"optim.accumulate={parts}"))
    compute, shrunk, before = run.train_step.padded.compute, False, {"item": 0}
    assert compute is not None
    with run.open_schedule(0) as schedule:
        for ready in schedule:
            run.train_step.run(ready, schedule)
            assert ready.padded is not None
            (room,) = compute._rooms.values()
            for name, rows in room.rows.items():
                real = ready.padded.real_rows[name]
                assert rows[:real].abs().sum() > 0, name
                assert not rows[real:].any(), name
            shrunk |= ready.padded.real_rows["item"] < before["item"]
            before = dict(ready.padded.real_rows)
    assert shrunk


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(1, 9),
)
def test_places_of_padded_sequences_are_those_of_plain_ones(
    lengths: list[int], front: int, after: int, pads: int
) -> None:
    from freescale.data import TokenRule
    from freescale.kernels import LayoutRoom, SequenceLayout
    from freescale.model.inputs.feature_tokens import _Places
    from freescale.model.inputs.padded_places import padded_places
    from freescale.pipeline.padding.source import PaddingSource

    rule = TokenRule(front, after)
    offsets = np.concatenate([[0], np.cumsum(lengths), np.full(2, sum(lengths))]).astype(np.int64)
    room = LayoutRoom(tokens=int(offsets[-1]) + pads, longest=6)
    source = PaddingSource(offsets, {}, [], [], room, {}, 1, np.zeros(0), rule=rule)
    assert source.longer is not None
    starts, longer_room = source.longer
    layout = SequenceLayout(torch.from_numpy(offsets), room=room)
    longer = SequenceLayout(torch.from_numpy(starts), room=longer_room)
    made, plain = padded_places(layout, longer, rule), _Places.of(offsets, rule)
    real, events, samples = len(plain.order[0]), int(offsets[-1]), len(offsets) - 1
    assert starts[-1] == real < longer.num_tokens
    assert made.event[:real].tolist() == plain.event.tolist()
    assert made.last[:events].tolist() == plain.last.tolist()
    assert (made.last[events:] == longer.num_tokens - 1).all()
    # Plain ones leave out sequences without events, and pads.
    used = plain.samples
    source_of = np.concatenate(
        [
            *(samples * n + used for n in range(front)),
            *(samples * front + room.tokens * n + np.arange(events) for n in range(1 + after)),
        ]
    )
    assert made.order[:real].tolist() == source_of[plain.order[0]].tolist()
    back = np.full(samples * front + room.tokens * (1 + after), longer.num_tokens - 1)
    back[source_of] = plain.order[1]
    assert made.back.tolist() == back.tolist()
    assert (made.order >= 0).all()
    assert (made.order < len(back)).all()
