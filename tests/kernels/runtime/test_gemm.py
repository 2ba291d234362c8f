"""Products of tokens and weights: right in every precision, and which sizes are made ready when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.kernels.runtime import gemm as products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_stay_as_narrow_as_they_are_under_autocast(dtype):
    x, weight, grad = (torch.randn(shape, dtype=dtype) for shape in ((7, 4), (4, 6), (7, 6)))
    before = grad.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made, summed = products.product(x, weight), products.weight_gradient(x, grad)
        products.add_product_to(grad, x, weight)
    for ours, truth in ((made, x @ weight), (summed, x.t() @ before), (grad, torch.addmm(before, x, weight))):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, truth)


@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=30))
def test_no_batch_is_far_from_a_size_that_was_made_ready(batches):
    loaded, done = None, list[int]()
    for num_tokens in batches:
        sizes = products.sizes_to_load(num_tokens, loaded)
        assert len(sizes) <= 2 * products._SIZES + 1
        if not products._FEW_TOKENS <= num_tokens <= products._MANY_TOKENS:
            assert not sizes
            continue
        if sizes:
            assert sizes[-1] <= products._MANY_TOKENS
            done += sizes
            known = [*(loaded or ()), sizes[0], sizes[-1], num_tokens]
            loaded = min(known), max(known)
        assert not products.sizes_to_load(num_tokens, loaded)
        # A step is a 170th of the batch it was chosen for, or a 512th of a gap between batches.
        assert min(abs(size - num_tokens) for size in done) <= max(num_tokens // 80, 600)


@given(st.integers(0, 300_000), st.integers(0, 300_000), st.lists(st.integers(1, 400_000), max_size=30))
def test_sizes_that_are_expected_are_made_ready_at_once_and_others_never(fewest, more, batches):
    expected, loaded = (fewest, fewest + more), None
    for num_tokens in batches:
        sizes = products.sizes_to_load(num_tokens, loaded, expected)
        if sizes:
            assert loaded is None
            assert fewest <= num_tokens <= fewest + more
            loaded = min(sizes[0], num_tokens), max(sizes[-1], num_tokens)
            assert len(sizes) <= 2 * products._SIZES + 1
            assert sizes.step <= 1 + more // products._SIZES
            assert loaded[0] == max(fewest, products._FEW_TOKENS)
            if fewest + more < products._MANY_TOKENS - sizes.step:
                assert fewest + more <= loaded[1]
            else:  # no size above the largest: the last few are less than a step from one
                loaded = loaded[0], products._MANY_TOKENS


def test_another_run_in_the_same_process_expects_other_sizes():
    small = products.sizes_to_load(5000, None, (4500, 6000))
    assert small[0] == 4500
    assert small[-1] >= 6000
    more = products.sizes_to_load(40_000, (4500, 6000), (4100, 50_000))
    assert more[0] == 6000
    assert more[-1] >= 50_000
    # What lies between is nobody's.
    assert products.sizes_to_load(100_000, (4500, 6000), (90_000, 120_000))[0] == 90_000
    assert not products.sizes_to_load(60_000, (4500, 50_000), (4100, 50_000))


def test_expectations_end_with_the_run(monkeypatch):
    monkeypatch.setattr(products, "_expected", None)
    with products.gemm_warmup(1, 2):
        assert products._expected == (1, 2)
    with pytest.raises(RuntimeError), products.gemm_warmup(1, 2):
        raise RuntimeError
    assert products._expected is None


class OnGPU(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.mark.parametrize("free", [1 << 30, 1 << 10])
def test_sizes_are_made_ready_once_never_while_a_graph_is_recorded_nor_without_room(free, monkeypatch):
    done: list[int] = []
    really = torch.mm
    monkeypatch.setattr(products, "_loaded", {})
    monkeypatch.setattr(products, "free_bytes", lambda device: free)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: done.append(a.shape[0]) or really(a, b, out=out))
    x, weight = torch.ones(5000, 2).as_subclass(OnGPU), torch.ones(2, 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    products.product(x, weight)
    assert done == [5000]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    products.product(x, weight)
    if free < 1 << 20:
        assert done == [5000, 5000]
        return
    assert min(done) == 2500
    assert max(done) > 9900
    assert done[-1] == 5000
    count = len(done)
    products.product(x, weight)
    products.product(x[:4990], weight)
    assert len(done) == count + 2
