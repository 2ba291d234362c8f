"""Weights are updated as the next forward reaches them, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from freescale.errors import TrainingError
from freescale.model.encoders.hstu import HSTU, HSTULayer
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute import dense_gradients, late_update, split_backward
from freescale.train.compute.late_update import BEFORE, LateUpdate, Piece, by_layer, layers_of
from freescale.train.compute.postponed_pieces import DensePiece, PieceSums
from freescale.train.loop import train
from tests.ranks import run_on_ranks
from tests.small_run import MANY_PIECES, make_run, train_small
from tests.train.compute.test_split_backward import MODELS, PLAIN, POSTPONED, assert_same_bits


class Encoder(nn.Module):
    """Two layers, of which the second may be left out, and a weight of its own."""

    calls_layers = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.short = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 1 if self.short else 2]:
            x = layer(x)
        return x * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def left(model: Model, late: LateUpdate, seen: list[Any]) -> None:
    """Gradients of 1 for every weight are on their way; with a rate of 0.5 they halve it."""
    for param in (model.encoder.scale, *(layer.weight for layer in model.encoder.layers)):
        layer = late.layer_of([param])
        wait = lambda layer=layer: seen.append(layer)  # noqa: E731
        late.leave(Piece([param], torch.ones(1), wait, None), lr=0.5)


def start() -> tuple[Model, LateUpdate, list[Any]]:
    model = Model()
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    late = LateUpdate(model, optimizer, timer=StepTimer(torch.device("cpu")))
    for number, layer in enumerate(model.encoder.layers):
        layer.register_forward_hook(lambda *_, number=number: seen.append(f"forward {number}"))
    return model, late, seen


@torch.no_grad()
def test_a_layer_is_updated_when_the_forward_reaches_it():
    model, late, seen = start()
    assert float(model(torch.ones(1, 1))) == 1.0
    seen.clear()
    left(model, late, seen)
    assert all(param.grad is None for param in model.parameters())
    assert float(model(torch.ones(1, 1))) == 0.125  # every weight was halved before it was read
    assert seen == [BEFORE, 0, "forward 0", 1, "forward 1"]
    assert float(model(torch.ones(1, 1))) == 0.125  # once


@torch.no_grad()
def test_before_a_forward_that_nothing_is_known_of_everything_is_updated():
    model, late, seen = start()
    left(model, late, seen)
    assert float(model(torch.ones(1, 1))) == 0.125
    assert seen[:3] == [BEFORE, 0, 1]
    model.encoder.calls_layers = False  # type: ignore[misc]
    other = LateUpdate(
        model, torch.optim.SGD(model.parameters(), lr=1.0), timer=StepTimer(torch.device("cpu"))
    )
    assert other.layer_of(list(model.encoder.layers.parameters())) == BEFORE


@torch.no_grad()
def test_settling_updates_what_was_left_and_nothing_else():
    model, late, seen = start()
    left(model, late, seen)
    model.encoder.scale.grad = torch.full((1,), 7.0)  # of a weight that had its turn
    late.settle()
    assert [float(param) for param in model.parameters()] == [0.5, 0.5, 0.5]
    assert float(model.encoder.scale.grad) == 7.0
    late.settle()
    assert [float(param) for param in model.parameters()] == [0.5, 0.5, 0.5]


def test_a_forward_that_read_old_weights_is_refused():
    """It cannot be told from outside what a forward reads: one that leaves out what the last one called may read it."""
    model, late, seen = start()
    model(torch.ones(1, 1))
    left(model, late, seen)
    model.encoder.short = True
    with pytest.raises(
        TrainingError, match=r"not updated yet(.|\n)*layer 1 was called in the forward before"
    ):
        model(torch.ones(1, 1))


def test_an_encoder_that_promises_layers_and_has_none_is_told():
    model = Model()
    del model.encoder.layers
    with pytest.raises(TrainingError, match=r"no `layers` to call(.|\n)*Encoder.layers is NoneType"):
        layers_of(model)


@pytest.mark.parametrize(("most", "groups"), [(1, [1, 1, 1]), (8, [2, 1]), (1 << 20, [3])])
def test_weights_are_grouped_as_pieces_of_their_gradients_travel(
    most: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that begins in a layer is waited for, and updated, with that layer."""
    monkeypatch.setattr(late_update, "bucket_bytes", lambda num_bytes: most)
    model = Model()
    found = by_layer(model)
    assert [len(each) for each in found] == groups
    wanted = [model.encoder.scale, *(layer.weight for layer in model.encoder.layers)]
    assert [id(param) for each in found for param in each] == [id(param) for param in wanted]


def test_runs_of_many_pieces_have_one_a_layer(tmp_path: Path) -> None:
    """With fewer, replays on a GPU would be cut nowhere, and their tests would hold whatever happens at a cut."""
    run, _ = make_run(MANY_PIECES, tmp_path)
    assert len(by_layer(run.train_step._model)) == 4


def beside_the_forward(rank: int, recipe: tuple[str, ...], folder: Path) -> list[str]:
    """Ranks that add up as those of two machines do, in small pieces; what a step in the middle did, in its order."""
    dense_gradients.on_one_machine = lambda: False
    split_backward.bucket_bytes = lambda num_bytes: 512
    told: list[str] = []
    update, forward = LateUpdate._step, HSTULayer.forward

    def watched(self: LateUpdate, due: Any) -> None:
        told.append(f"update {sorted({self.layer_of(piece.params) for piece in due})}")
        update(self, due)

    def watched_forward(self: HSTULayer, x: Any, view: Any, number: int) -> Any:
        told.append(f"forward {number}")
        return forward(self, x, view, number)

    LateUpdate._step, HSTULayer.forward = watched, watched_forward  # type: ignore[method-assign]
    recipe = (*recipe, "run.steps=9", "run.eval_every=4", "pipeline.decide_every=null")
    ours = train_small((*recipe, POSTPONED), folder / "late")
    seen = list(told)
    assert_same_bits(ours, train_small((*recipe, PLAIN), folder / "plain"))
    assert_evals(ours, train_small((*recipe, PLAIN), folder / "again"))
    return seen


def assert_evals(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    pairs = list(zip(ours["evals"], plain["evals"], strict=True))
    assert pairs
    for one, other in pairs:
        assert one["hr@10"] == other["hr@10"]
        assert one["ndcg@10"] == other["ndcg@10"]


def test_layers_learn_beside_the_next_forward_with_the_bits_of_the_plain_order(tmp_path: Path):
    seen, other = run_on_ranks(beside_the_forward, 2, MODELS["hstu"], tmp_path, timeout=110)
    assert seen == other
    assert HSTU.calls_layers
    begin = seen.index("update [-1]")
    # Layer by layer in the second step; and before an evaluation everything at once.
    assert seen[begin : begin + 5] == ["update [-1]", "update [0]", "forward 0", "update [1]", "forward 1"]
    assert "update [-1, 0, 1]" in seen


def notices(rank: int, folder: Path, *keys: str) -> list[str]:
    recipe = (
        *MODELS["hstu"],
        "run.steps=2",
        "run.eval_every=0",
        "pipeline.decide_every=null",
        POSTPONED,
        *keys,
    )
    run, recorder = make_run(recipe, folder)
    train(run)
    return [event["text"] for event in recorder.of("notice")]


def test_a_bound_on_the_norm_is_told_to_keep_updates_at_the_end_of_a_step(tmp_path: Path):
    word = "optim.clip_norm needs the norm of all gradients"
    clipped, free = (
        run_on_ranks(notices, 2, tmp_path / name, *keys, timeout=60)[0]
        for name, keys in (("clipped", ("optim.clip_norm=1.0",)), ("free", ()))
    )
    assert sum(word in text for text in clipped) == 1
    assert not any(word in text for text in free)


def notices_without_layers(rank: int, folder: Path) -> list[str]:
    with patch.object(HSTU, "calls_layers", False):
        return notices(rank, folder)


def test_an_encoder_that_does_not_say_how_it_calls_its_layers_is_told_what_that_costs(tmp_path: Path):
    told = run_on_ranks(notices_without_layers, 2, tmp_path, timeout=60)[0]
    assert sum("the encoder hstu does not say `calls_layers`" in text for text in told) == 1


def test_a_piece_whose_weights_no_loss_depends_on_is_waited_for_at_once() -> None:
    """Nobody comes to wait for it later, and the next step writes to the same place."""
    waited: list[str] = []
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    used.grad = torch.zeros(2)
    left: list[Piece] = []
    total: Any = SimpleNamespace(
        start=lambda values: lambda: waited.append(f"{len(values)} numbers"), forget=lambda: None
    )
    late: Any = SimpleNamespace(
        leave=lambda piece, lr, layer: left.append(piece), layer_of=lambda params: BEFORE
    )
    timer: Any = SimpleNamespace(handed_over=lambda: None)
    sums = PieceSums(total, late=late, timer=timer)
    for param in (used, unused):
        sums.send(DensePiece(torch.zeros(param.numel()), (param,), (torch.zeros(param.numel()),)))
    assert sums.leave(lr=torch.ones(()))
    assert waited == ["3 numbers"]
    assert [[id(param) for param in piece.params] for piece in left] == [[id(used)]]
