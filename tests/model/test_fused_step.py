"""The whole model with its fused kernels, run by Triton's interpreter, against the same model in plain PyTorch."""

from __future__ import annotations

import importlib

import pytest
import torch

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels.runtime.launch import start_kernel
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@pytest.mark.parametrize("ffn", [None, {"kind": "dense", "hidden": 20}])
def test_loss_and_gradients_are_those_of_the_plain_model(monkeypatch, ffn):
    torch.manual_seed(0)
    lengths = [5, 0, 70, 1]
    tokens, num_rows, dim = sum(lengths), 30, 24
    encoder = HSTU(dim=dim, layers=3, heads=2, max_length=80, ffn=ffn)
    model = Recommender(encoder=encoder, head=RetrievalHead(temperature=0.3))
    for param in model.parameters():
        param.data.normal_(std=0.3)
    rows = torch.randn(num_rows, dim).requires_grad_()
    batch = SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        tokens={name: torch.randint(num_rows, (tokens,)) for name in ("item_index", "target_index")},
        samples={"negative_index": torch.randint(num_rows, (len(lengths), 9))},
    )
    inputs = [rows, *model.parameters()]

    def run():
        loss = model(rows, batch)
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    plain = run()
    started = []

    def noted(kernel, *rest):
        started.append(kernel)
        start_kernel(kernel, *rest)

    for name in ("parts", "row_programs", "input", "softmax"):
        module = importlib.import_module(f"freescale.kernels.hstu.{name}")
        monkeypatch.setattr(module, "can_fuse", lambda *args, **width: True, raising=name != "row_programs")
        monkeypatch.setattr(module, "start_kernel", noted)
    fused = run()
    # Six of every layer, the input's, five of the loss.
    assert len(started) == 3 * 6 + 1 + 5
    for ours, wanted in zip(fused, plain):
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
