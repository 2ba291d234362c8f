"""A layer as one function of autograd, run by Triton's interpreter, against the reference and the plain layer."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from freescale import dropout_keys
from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import AttentionMask, SequenceLayout
from freescale.kernels.attention.triton import bias_gradients
from freescale.kernels.hstu import LayerWeights, WholeBatch, parts, reference
from freescale.kernels.hstu import layer as hstu_layer
from freescale.kernels.runtime import PostponedGradients
from freescale.model.encoders.hstu import HSTULayer
from freescale.model.views.view import BatchView
from tests.effort import slow

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)

LENGTHS = [5, 0, 70, 1]
TOKENS, DIM = sum(LENGTHS), 24


def _batch() -> SequenceBatch:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    times = torch.randint(10**6, (TOKENS,)).sort().values
    return SequenceBatch(
        offsets=offsets,
        tokens={"time": times, "target_time": times + 50},
        samples={"row": torch.arange(len(LENGTHS))},
    )


def _layer(*, dropout: float = 0.0, **bias: bool) -> HSTULayer:
    layer = HSTULayer(dim=DIM, heads=2, max_length=80, dropout=dropout, **bias)
    layer.dropout.site = 3
    for param in layer.parameters():
        param.data.normal_(std=0.3)
    return layer


@pytest.mark.parametrize(
    ("position", "time", "window", "dropout"),
    [
        slow(False, False, None, 0.0),
        (True, False, 9, 0.3),
        (False, True, None, 0.0),
        slow(True, True, None, 0.3),
    ],
)
def test_states_and_gradients_are_those_of_the_reference(monkeypatch, position, time, window, dropout):
    torch.manual_seed(0)
    layer, batch = _layer(position_bias=position, time_bias=time, dropout=dropout), _batch()
    mask = None if window is None else AttentionMask(window=window)
    x = torch.randn(TOKENS, DIM).requires_grad_()
    grad = torch.randn(TOKENS, DIM)

    def run():
        with dropout_keys(seed=0, step=0, batch=batch):
            out = layer(x, BatchView(batch, SequenceLayout(batch.offsets), mask=mask), 0)
        # The gradient of what follows comes in strides of its own.
        return out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad.t().contiguous().t())

    plain, functions = run(), []
    truth = of_the_reference(layer, batch, mask, x, grad)
    apply = hstu_layer._Layer.apply
    monkeypatch.setattr(hstu_layer._Layer, "apply", lambda *args: functions.append(1) or apply(*args))
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    fused = run()
    assert functions == [1]
    for by_parts, ours, wanted in zip(plain, fused, truth, strict=True):
        close = {"rtol": 1e-3, "atol": 1e-4 * float(wanted.abs().max())}
        torch.testing.assert_close(ours.double(), wanted, **close)
        torch.testing.assert_close(by_parts.double(), wanted, **close)


def of_the_reference(layer, batch, mask, x, grad):
    """States and the gradients of x and of the parameters, in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *layer.parameters())]
    named = dict(zip(("x", *(name for name, _ in layer.named_parameters())), wide, strict=True))
    weights = LayerWeights(
        uvqk=named["uvqk"],
        output=named["output.weight"],
        output_bias=named["output.bias"],
        position_bias=named.get("bias.position"),
        time_bias=named.get("bias.time"),
    )
    times = {"query_time": batch.tokens["target_time"], "key_time": batch.tokens["time"]}
    whole = WholeBatch(layout=SequenceLayout(batch.offsets), mask=mask, **times)
    with dropout_keys(seed=0, step=0, batch=batch):
        dropped = layer.dropout.mask(x.shape)
    out = reference.fused_layer(
        wide[0], weights, whole, heads=layer.heads, scale=layer.scale, dropped=dropped
    )
    return out.detach(), *torch.autograd.grad(out, wide, grad.double())


def test_gradients_from_kept_scores_are_those_of_the_plain_layer(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(bias_gradients, "KEPT_WIDTHS", (0, 64))
    layer, batch = _layer(position_bias=False, time_bias=False).half(), _batch()
    x, grad = torch.randn(TOKENS, DIM).half().requires_grad_(), torch.randn(TOKENS, DIM).half()

    def run():
        out = layer(x, BatchView(batch, SequenceLayout(batch.offsets)), 0)
        return torch.autograd.grad(out, [x, *layer.parameters()], grad)

    plain = run()
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    for ours, wanted in zip(run(), plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=5e-3 * float(wanted.abs().max()))


def test_the_graph_can_be_gone_through_again_and_then_holds_nothing(monkeypatch):
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    layer, batch = _layer(position_bias=False, time_bias=False), _batch()
    x = torch.randn(TOKENS, DIM).requires_grad_()
    out = layer(x, BatchView(batch, SequenceLayout(batch.offsets)), 0)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(first, again)
    assert not any(part.saved_tensors for part in out.grad_fn.parts)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), x)


def test_parts_run_apart_where_something_comes_between_them(monkeypatch):
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    monkeypatch.setattr(hstu_layer._Layer, "apply", lambda *args: pytest.fail("not apart"))
    batch = _batch()
    x = torch.randn(TOKENS, DIM)
    seen = []
    keeping = BatchView(batch, SequenceLayout(batch.offsets), keep=lambda *given: seen.append(given))
    _layer(position_bias=True, time_bias=False)(x, keeping, 3)
    assert [number for number, *_ in seen] == [3]


def test_tables_that_are_too_short_are_refused(monkeypatch):
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    batch = _batch()
    short = HSTULayer(dim=DIM, heads=2, max_length=69, dropout=0.0, position_bias=True, time_bias=False)
    with pytest.raises(ValueError, match="69 weights"):
        short(torch.randn(TOKENS, DIM), BatchView(batch, SequenceLayout(batch.offsets)), 0)


def test_states_of_another_batch_are_refused(monkeypatch):
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: True)
    batch = _batch()
    with pytest.raises(ValueError, match=f"end at {TOKENS}, {TOKENS - 1} tokens"):
        _layer(position_bias=False, time_bias=False)(
            torch.randn(TOKENS - 1, DIM), BatchView(batch, SequenceLayout(batch.offsets)), 0
        )


@pytest.mark.parametrize(
    ("by_parts", "score_bytes"), [slow(False, 2**30), (True, 2**30), (False, 40_000), slow(False, 0)]
)
def test_weight_gradients_that_come_later_have_the_same_bits(monkeypatch, by_parts, score_bytes):
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", score_bytes)
    torch.manual_seed(0)
    layer, batch = _layer(position_bias=True, time_bias=True), _batch()
    x = torch.randn(TOKENS, DIM).requires_grad_()
    monkeypatch.setattr(hstu_layer, "can_fuse", lambda x: not by_parts)
    if by_parts:
        monkeypatch.setattr(parts, "can_fuse", lambda x, **_: True)

    def gradients(taker=None):
        x.grad = None
        layer.zero_grad()
        with nullcontext() if taker is None else taker.taking():
            layer(x, BatchView(batch, SequenceLayout(batch.offsets)), 0).square().sum().backward()
        if taker is not None:
            assert layer.uvqk.grad is None
            assert layer.output.weight.grad is None
            assert by_parts or layer.bias.time.grad is layer.bias.position.grad is None
            taker.compute()
        return [x.grad, *[param.grad for param in layer.parameters()]]

    wanted, taker = gradients(), PostponedGradients(most_bytes=1 << 30)
    for ours, truth in zip(gradients(taker), wanted, strict=True):
        assert torch.equal(ours, truth)
    assert taker.num_postponed == (2 if by_parts else 4)
