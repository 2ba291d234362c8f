"""The parts of a layer beside attention, in Triton's interpreter, against the reference; see tests/gpu for a GPU."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels import add_product, gate, project_uvqk
from freescale.kernels.hstu import reference
from freescale.kernels.hstu.parts import GradBuffer, project_targets

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def parts_of_a_layer(x, weight, bias, attended, output, *, fused, u_twice):
    """Everything of a layer but attention; `u_twice`: somebody else needs u, too."""
    proj = project_uvqk(x, weight, bias=bias, fused=fused)
    gated = gate(proj, attended + proj.v, fused=fused) * proj.q + proj.k
    if u_twice:
        gated = gated + proj.u.sin()
    return add_product(proj, gated, output, fused=fused)


def parts_of_the_reference(x, weight, bias, attended, output, *, u_twice):
    """The same of the reference."""
    u, v, q, k, residual = reference.project_uvqk(x, weight, bias=bias)
    gated = reference.gate(u, attended + v) * q + k
    return reference.add_product(residual, gated + u.sin() if u_twice else gated, output)


@pytest.mark.parametrize("u_twice", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(37, 20), (300, 20), (70, 64)])
def test_parts_of_a_layer_and_their_gradients_are_those_of_the_reference(tokens, width, u_twice):
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape, scale=0.3):
        return (scale * torch.randn(shape, generator=draw)).requires_grad_()

    x, attended = drawn(tokens, 24, scale=1.0), drawn(tokens, width, scale=1.0)
    inputs = [x, drawn(24, 4 * width), drawn(24), attended, drawn(24, width)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = parts_of_the_reference(*wide, u_twice=u_twice)
    truth = (wanted, *torch.autograd.grad(wanted.sin().square().sum(), wide))
    for fused in (False, True):
        out = parts_of_a_layer(*inputs, fused=fused, u_twice=u_twice)
        loss = out.sin().square().sum()
        found = (out, *torch.autograd.grad(loss, inputs, retain_graph=True))
        # A second backward through the same graph must not find what the first one left behind.
        again = torch.autograd.grad(loss, inputs)
        assert all(torch.equal(a, b) for a, b in zip(again, found[1:], strict=True))
        for got, want in zip(found, truth, strict=True):
            # Plain float32 itself is off by up to 6e-6 of the largest number.
            torch.testing.assert_close(
                got.double(), want, rtol=1e-4, atol=2e-5 * float(want.detach().abs().max())
            )


def test_the_gate_leaves_the_gradient_of_u_where_the_projection_wants_it():
    room, u = GradBuffer(), torch.randn(5, 3)
    du = room.for_u(u)
    du[:] = u
    wide = room.around(du)
    assert wide.shape == (5, 12)
    assert wide.data_ptr() == du.data_ptr()
    assert torch.equal(wide[:, :3], u)
    # Used up; and another gradient than the gate's is copied to its place.
    assert room.around(du).data_ptr() != du.data_ptr()
    room.for_u(u)
    assert torch.equal(room.around(u)[:, :3], u)


def test_autograd_hands_that_gradient_over_as_it_is(monkeypatch):
    copied = []
    around = GradBuffer.around
    monkeypatch.setattr(
        GradBuffer,
        "around",
        lambda room, du: (copied.append(du.stride(0) != 4 * du.shape[1]), around(room, du))[1],
    )
    x, weight, bias = torch.randn(9, 6).requires_grad_(), torch.randn(6, 16), torch.randn(6)
    proj = project_uvqk(x, weight, bias=bias, fused=True)
    gate(proj, proj.v + proj.q * proj.k, fused=True).sum().backward()
    assert copied == [False]


def test_projections_of_targets_are_those_of_the_reference():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 4), torch.randn(4, 16), torch.randn(4)
    rows = torch.tensor([2, 7, 8])
    x, weight, bias = x.double(), weight.double(), bias.double()
    ours, truth = (
        project_targets(x, weight, rows, bias=bias),
        reference.project_targets(x, weight, rows, bias=bias),
    )
    for one, other in zip(ours[:5], truth, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
