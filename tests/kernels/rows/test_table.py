"""Updates of rows by Triton kernels, in Triton's interpreter, against the reference; see tests/gpu for a GPU."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels.rows import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 1), (300, 50), (70, 128)])
def test_updates_are_those_of_the_reference(count, width):
    from freescale.kernels.rows.triton import table as triton_table

    draw = torch.Generator().manual_seed(count)
    grad, first, second = (torch.randn(count, width, generator=draw) for _ in range(3))
    torch.testing.assert_close(triton_table.mean_squares(grad), reference.mean_squares(grad))
    table = torch.randn(2 * count + 1, width, generator=draw)
    tables = [table.clone() for _ in range(2)]
    rows, scale = torch.randperm(2 * count + 1, generator=draw)[:count], torch.randn(count, generator=draw)
    triton_table.add_scaled(tables[0], rows, grad, scale)
    reference.add_scaled(tables[1], rows, grad, scale)
    torch.testing.assert_close(*tables)
    moments = [(first.clone(), second.square()) for _ in range(2)]
    rates = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8}
    ours = triton_table.adam_direction(grad, *moments[0], correction2=1 - 0.98**3, **rates)
    wanted = reference.adam_direction(grad, *moments[1], step=3, **rates)
    for x, y in zip((ours, *moments[0]), (wanted, *moments[1])):
        torch.testing.assert_close(x, y)


def test_a_row_has_the_same_bits_wherever_it_stands():
    from freescale.kernels.rows.triton import table as triton_table

    values = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(triton_table.mean_squares(values[1:]), triton_table.mean_squares(values)[1:])
