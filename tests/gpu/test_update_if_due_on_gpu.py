"""Updates of layers that stand in CUDA graphs, replayed or left out: the bits of the optimizer's own step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from freescale.train.compute.padded_step import _recordable
from freescale.train.compute.recorder import Recorder
from freescale.train.compute.update_if_due import UpdateIfDue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
LAYERS, LR = 3, 0.01


class Twin:
    """Weights of three layers and their optimizer, the same whenever it is made."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = [(64, 256), (256,), (3, 5)]
        self.layers = [
            [nn.Parameter(torch.randn(*shape, generator=draw).to(DEVICE)) for shape in shapes]
            for _ in range(LAYERS)
        ]
        self.weights = [param for layer in self.layers for param in layer]
        self.optimizer = torch.optim.AdamW(self.weights, lr=LR, weight_decay=0.1, fused=True)
        self.rate = _recordable(self.optimizer, DEVICE)

    def give(self, turn: int) -> None:
        """Gradients of this turn, in the places of the last ones."""
        draw = torch.Generator().manual_seed(turn)
        for param in self.weights:
            grad = torch.randn(param.shape, generator=draw).to(DEVICE)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.copy_(grad)

    def step(self, turn: int) -> None:
        self.give(turn)
        self.rate.fill_(LR / (1 + turn))
        self.optimizer.step()

    def learnt(self) -> list[Tensor]:
        states = [self.optimizer.state[param] for param in self.weights]
        return [
            *self.weights,
            *(state[name] for state in states for name in ("step", "exp_avg", "exp_avg_sq")),
        ]


def test_replayed_updates_have_the_bits_of_a_step_and_move_nothing_where_they_are_not_due() -> None:
    plain, ours = Twin(), Twin()
    plain.step(0)
    ours.step(0)
    update = UpdateIfDue(ours.optimizer)
    assert update.possible
    assert update.knows(ours.weights)
    gradients = [{param: param.grad for param in layer} for layer in ours.layers]
    update.count(ours.weights)  # not due: it loads the kernels, as a run does before it records
    for each in gradients:
        update.run(each)
    recorder = Recorder(DEVICE)
    graphs = [recorder.record(partial(update.count, ours.weights))]
    graphs += [recorder.record(partial(update.run, each)) for each in gradients]
    assert all(graph is not None for graph in graphs), "an update could not be recorded"
    for turn, due in enumerate([True, False, True, True, False, False, True], 1):
        ours.give(turn)
        ours.rate.fill_(LR / (1 + turn))
        update.tell(due)
        for graph in graphs:
            graph.replay()
        if due:
            plain.step(turn)
        for one, other in zip(ours.learnt(), plain.learnt(), strict=True):
            assert torch.equal(one, other), f"turn {turn}"
