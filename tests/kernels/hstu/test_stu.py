"""DLRMv4's layer and its input by fused kernels, run by Triton's interpreter, against the plain parts."""

from __future__ import annotations

import pytest
import torch

from freescale import dropout_keys
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout, Taken, sum_taken
from freescale.kernels.hstu import reference, stu
from freescale.model.encoders import stu as encoder
from freescale.model.encoders.stu import STULayer
from freescale.model.views.request_view import request_view

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)

LENGTHS, DIM = [5, 1, 40], 24
TOKENS = sum(LENGTHS)


def batch_of(targets):
    return SequenceBatch(
        offsets=torch.tensor([0, *LENGTHS]).cumsum(0),
        samples={"row": torch.arange(len(LENGTHS))},
        targets=torch.tensor(targets),
    )


def made_layer(dropout, *, seed):
    """One whose norms and biases are none that a mistake would leave unseen."""
    torch.manual_seed(seed)
    layer = STULayer(dim=DIM, heads=2, length=50, dropout=dropout)
    layer.dropout.site = 3
    for param in layer.parameters():
        param.data.add_(torch.randn_like(param) * 0.2)
    return layer


@pytest.mark.parametrize(("targets", "dropout"), [((1, 1, 1), 0.0), ((2, 1, 3), 0.3)])
def test_a_layer_as_one_function_is_the_layer_by_its_parts(monkeypatch, targets, dropout):
    layer, batch = made_layer(dropout, seed=0), batch_of(targets)
    x = torch.randn(TOKENS, DIM).requires_grad_()
    grad = torch.randn(TOKENS, DIM)

    def run():
        view = request_view(batch, SequenceLayout(batch.offsets), None)
        with dropout_keys(seed=0, step=0, batch=batch):
            out = layer(x, view, 0)
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    plain = run()
    view = request_view(batch, SequenceLayout(batch.offsets), None)
    with dropout_keys(seed=0, step=0, batch=batch):
        dropped = layer.dropout.mask(x.shape)
    named = dict(layer.named_parameters())
    weights = stu.STUWeights(*(named[name] for name in stu.STUWeights._fields))
    whole = view.fusable_batch(time=False)
    options = {"heads": 2, "alpha": layer.alpha, "scale": layer.scale, "dropped": dropped}
    torch.testing.assert_close(
        plain[0], reference.fused_stu_layer(x, weights, whole, **options), rtol=1e-4, atol=1e-5
    )
    monkeypatch.setattr(encoder, "can_fuse_stu", lambda x, *, heads: True)
    for name, found, expected in zip(("out", "x", *dict(layer.named_parameters())), run(), plain):
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("targets", "dropout"), [((1, 1, 1), 0.0), ((2, 1, 3), 0.3)])
def test_a_short_layer_by_fused_kernels_is_the_one_by_its_parts(monkeypatch, targets, dropout):
    layer, batch = made_layer(dropout, seed=3), batch_of(targets)
    x = torch.randn(TOKENS, DIM).requires_grad_()
    grad = torch.randn(sum(targets), DIM)

    def run(of):
        view = request_view(batch, SequenceLayout(batch.offsets), None)
        with dropout_keys(seed=0, step=0, batch=batch):
            out = of(view)
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    whole = run(lambda view: layer(x, view, 0).index_select(0, view.target_index))
    plain = run(lambda view: layer.of_targets(x, view, 0))
    view = request_view(batch, SequenceLayout(batch.offsets), None)
    named = dict(layer.named_parameters())
    weights = stu.STUWeights(*(named[name] for name in stu.STUWeights._fields))
    of_targets, index = view.only_targets.fusable_batch(time=False), view.target_index
    options = {"heads": 2, "alpha": layer.alpha, "scale": layer.scale}
    for found, expected in zip(
        stu.fused_stu_targets(x, index, weights, of_targets, **options),
        reference.fused_stu_targets(x, index, weights, of_targets, **options),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(encoder, "can_fuse_stu", lambda x, *, heads: True)
    fused = run(lambda view: layer.of_targets(x, view, 0))
    for name, *each in zip(("out", "x", *named), fused, plain, whole):
        for expected in each[1:]:
            torch.testing.assert_close(
                each[0], expected, rtol=1e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_the_norm_and_its_product():
    torch.manual_seed(1)
    given = [torch.randn(*shape).requires_grad_() for shape in ((9, DIM), (DIM,), (DIM,), (DIM, 10), (10,))]
    grad = torch.randn(9, 10)
    outs = [stu.stu_project(*given, fused=fused) for fused in (False, True)]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    for found, expected in zip(*(torch.autograd.grad(out, given, grad) for out in outs[::-1])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sums_of_rows():
    torch.manual_seed(2)
    wide = torch.randn(40, 2 * DIM).requires_grad_()  # the first half of its columns, as items come
    tables = [wide, torch.randn(9, DIM).requires_grad_(), torch.randn(70, DIM).requires_grad_()]
    index = [torch.randint(-1, len(table), (130,)) for table in tables]

    def made(fused):
        halves = [tables[0][:, :DIM], *tables[1:]]
        parts = [Taken(table, own, scale) for table, own, scale in zip(halves, index, (2.0, 1.5, 1.0))]
        return sum_taken(parts, fused=fused)

    plain, fused = made(False), made(True)
    torch.testing.assert_close(fused, plain)
    grad = torch.randn_like(plain)
    for found, expected in zip(*(torch.autograd.grad(out, tables, grad) for out in (fused, plain))):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
