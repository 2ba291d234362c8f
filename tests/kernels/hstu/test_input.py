"""The fused input of encoders, in Triton's interpreter, against the reference; see tests/gpu for a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels import SequenceLayout, input_states
from freescale.kernels.hstu import reference
from tests.effort import examples

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@examples(4, thorough=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7, 63, 64, 65, 100]), min_size=1, max_size=40).filter(any),
    width=st.sampled_from([1, 24, 130]),
)
def test_input_states_and_their_gradients_are_those_of_the_reference(lengths, width):
    draw = torch.Generator().manual_seed(len(lengths))
    layout = SequenceLayout(torch.tensor([0, *lengths]).cumsum(0))
    rows, position = (torch.randn(n, width, generator=draw) for n in (11, 103))
    slots = torch.randint(9, (sum(lengths),), generator=draw)
    weight = torch.randn(sum(lengths), width, generator=draw)

    def run(function, dtype, **options):
        inputs = [x.to(dtype).requires_grad_() for x in (rows, position)]
        out, past = function(inputs[0], slots, inputs[1], layout, scale=2.5, **options)
        loss = (out * weight).sum() + past.sin().sum()
        return out.detach(), *torch.autograd.grad(loss, inputs)

    truth = run(reference.input_states, torch.float64)
    for fused in (False, True):
        for got, wanted in zip(run(input_states, torch.float32, fused=fused), truth, strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


def test_each_token_meets_the_vector_of_its_own_position():
    rows, position = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    layout = SequenceLayout(torch.tensor([0, 3, 3, 4]))
    states, past = reference.input_states(rows, torch.tensor([0, 1, 0, 1]), position, layout, scale=3.0)
    assert states.flatten().tolist() == [13.0, 26.0, 33.0, 16.0]
    assert torch.equal(past, rows)
