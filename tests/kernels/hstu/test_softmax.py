"""Sampled softmax, by tiles and fused in Triton's interpreter, against the reference; see tests/gpu for a GPU.

The loss of a head is checked token by token in tests/model/test_heads.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout, sampled_softmax
from freescale.kernels.hstu import reference
from tests.effort import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def compare(
    lengths,
    *,
    width,
    num_negatives,
    normalize,
    temperature=0.05,
    dtype=torch.float64,
    seed=0,
    tolerance=1e-6,  # vectors without a direction are divided by 1e-6, rounded to float32
):
    draw = torch.Generator().manual_seed(seed)
    tokens, num_rows = sum(lengths), 9
    states = torch.randn(tokens, width, dtype=torch.float64, generator=draw)
    rows = torch.randn(num_rows, width, dtype=torch.float64, generator=draw)
    if dtype != torch.float16:  # gradients of vectors without a direction are divided by 1e-6
        states[::5] = 0
        rows[3] = 0
    target = torch.randint(num_rows, (tokens,), generator=draw)
    negative = torch.randint(num_rows, (len(lengths), num_negatives), generator=draw)
    layout = SequenceLayout(torch.tensor([0, *lengths]).cumsum(0))

    def run(function, kind, **options):
        inputs = [x.to(kind).requires_grad_() for x in (states, rows)]
        options |= {"temperature": temperature, "normalize": normalize}
        loss = function(*inputs, target, negative, layout, **options)
        return loss.detach(), *torch.autograd.grad(3 * loss, inputs)

    truth = run(reference.sampled_softmax, torch.float64)
    for fused in (False, True):
        loss, *gradients = run(sampled_softmax, dtype, fused=fused)
        assert all(x.dtype == dtype for x in gradients)
        for got, wanted in zip((loss, *gradients), truth, strict=True):
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(got.double() / scale, wanted / scale, rtol=0, atol=tolerance)


@examples(4, thorough=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 130]), min_size=1, max_size=4).filter(any),
    width=st.sampled_from([1, 16, 50, 100]),
    num_negatives=st.sampled_from([1, 7, 16, 130]),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_reference(lengths, width, num_negatives, normalize, seed):
    compare(lengths, width=width, num_negatives=num_negatives, normalize=normalize, seed=seed)


@pytest.mark.parametrize(("width", "num_negatives"), [(24, 20), (270, 140)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_precisions(dtype, width, num_negatives):
    """Each in blocks of its own shape, one of them and several."""
    compare(
        [70, 3],
        width=width,
        num_negatives=num_negatives,
        normalize=True,
        temperature=0.5,
        dtype=dtype,
        tolerance={torch.float32: 2e-5, torch.float16: 2e-2}[dtype],
    )


def test_a_negative_that_is_the_target_does_not_count():
    layout, rows = SequenceLayout(torch.tensor([0, 1])), torch.tensor([[1.0], [3.0]])
    for negative, logits in (([0, 1], [2.0, 6.0]), ([0, 0], [2.0]), ([1, 1], [2.0, 6.0, 6.0])):
        loss = reference.sampled_softmax(
            torch.tensor([[1.0]]), rows, torch.tensor([0]), torch.tensor([negative]), layout,
            temperature=0.5, normalize=False,
        )  # fmt: skip
        torch.testing.assert_close(loss, torch.tensor(logits).logsumexp(0) - 2)
