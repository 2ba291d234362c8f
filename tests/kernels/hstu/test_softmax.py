"""The fused sampled softmax, run by Triton's interpreter on the CPU, against plain PyTorch; see tests/gpu for a GPU.

Plain PyTorch itself is checked token by token in tests/model/test_heads.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout, sampled_softmax

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

    def run(kind, fused):
        inputs = [x.to(kind).requires_grad_() for x in (states, rows)]
        loss = sampled_softmax(
            *inputs, target, negative, layout, temperature=temperature, normalize=normalize, fused=fused
        )
        return loss, *torch.autograd.grad(3 * loss, inputs)

    (loss, *gradients), wanted_all = run(dtype, True), run(torch.float64, False)
    assert all(x.dtype == dtype for x in gradients)
    for got, wanted in zip((loss.detach(), *gradients), (x.detach() for x in wanted_all)):
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(got.double() / scale, wanted / scale, rtol=0, atol=tolerance)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 130]), min_size=1, max_size=4).filter(any),
    width=st.sampled_from([1, 16, 50, 100]),
    num_negatives=st.sampled_from([1, 7, 16, 130]),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fused_is_the_plain_one_in_values_and_gradients(lengths, width, num_negatives, normalize, seed):
    compare(lengths, width=width, num_negatives=num_negatives, normalize=normalize, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_precisions(dtype):
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-2}[dtype]
    compare(
        [70, 3], width=24, num_negatives=20, normalize=True, temperature=0.5, dtype=dtype, tolerance=tolerance
    )


def test_tiles_cover_every_token_once():
    layout = SequenceLayout(torch.tensor([0, 0, 5, 70, 70, 198]))
    tiles = layout.token_tiles(64)
    assert tiles.tolist() == [[1, 0, 5], [2, 5, 64], [2, 69, 1], [4, 70, 64], [4, 134, 64]]
    assert layout.token_tiles(64) is tiles
