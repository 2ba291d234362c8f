"""Gradients of weights that are put off: what autograd computes at once, in every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from freescale.kernels.runtime import PostponedGradients, linear, multiplied

FAR = 1 << 30


def gradients(x, parts, *, use, taker=None, runs=1):
    """Of x and every weight, after some backwards."""
    x = x.clone().requires_grad_()
    weights = [None if part is None else part.clone().requires_grad_() for part in parts]
    for _ in range(runs):
        if taker is None:
            use(x, *weights).square().sum().backward()
        else:
            with taker.taking():
                use(x, *weights).square().sum().backward()
            assert all(w is None or w.grad is None or taker.num_postponed == 0 for w in weights) or runs > 1
            taker.compute()
    return [x.grad, *[None if w is None else w.grad for w in weights]]


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@given(
    tokens=st.integers(0, 40),
    inner=st.integers(1, 33),
    outer=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    bias=st.booleans(),
    bound=st.sampled_from([0, 3000, FAR]),
)
def test_products_have_the_bits_of_autograd(tokens, inner, outer, dtype, bias, bound):
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, inner, dtype=dtype), torch.randn(outer, inner, dtype=dtype)
    shift = torch.randn(outer, dtype=dtype) if bias else None
    taker = PostponedGradients(most_bytes=bound)
    wanted = gradients(x, [weight, shift], use=F.linear)
    assert_equal(gradients(x, [weight, shift], use=linear, taker=taker), wanted)
    assert taker.most_kept_bytes <= bound
    wanted = gradients(x, [weight.t().contiguous()], use=torch.matmul)
    assert_equal(gradients(x, [weight.t().contiguous()], use=multiplied, taker=taker), wanted)


def test_what_would_take_most_of_the_room_leaves_it_to_others():
    """Kept scores of one layer took what the products of three others need."""
    taker, computed = PostponedGradients(most_bytes=1000), []
    weights = [torch.zeros(1, requires_grad=True) for _ in range(4)]
    kept = [torch.zeros(size) for size in (25, 126, 25, 25)]

    def add_all():
        for number, weight in enumerate(weights):
            taker.add(weight, lambda number=number: computed.append(number) or torch.ones(1), kept[number])

    add_all()
    assert computed == [1]
    assert taker.kept_bytes == 300
    taker.compute()
    assert all(weight.grad == 1 for weight in weights)
    taker.share = 0.5  # of what could be kept: not of what is too large for that
    add_all()
    assert taker.kept_bytes == 100


def test_a_bias_comes_with_its_weight():
    """Where x and grad are too much for a weight, grad alone would fill the room for its bias."""
    taker, x = PostponedGradients(most_bytes=8000), torch.randn(40, 16)
    layers = [torch.nn.Linear(16, 16) for _ in range(2)]

    def use(x):
        for layer in layers:
            x = linear(x, layer.weight, layer.bias)
        return x

    with taker.taking():
        use(x).square().sum().backward()
    assert taker.num_postponed == taker.kept_bytes == 0
    taker.compute()
    wanted = [param.grad.clone() for layer in layers for param in layer.parameters()]
    roomy = PostponedGradients(most_bytes=FAR)
    for layer in layers:
        layer.zero_grad()
    with roomy.taking():
        use(x).square().sum().backward()
    assert roomy.num_postponed == 4
    roomy.compute()
    assert_equal([param.grad for layer in layers for param in layer.parameters()], wanted)


def test_a_weight_used_twice_and_in_two_backwards_adds_up_in_the_same_order():
    torch.manual_seed(0)
    x, weight = torch.randn(30, 9), torch.randn(9, 9)

    def twice(product):
        return lambda x, w: product(torch.tanh(product(x, w)), w)

    wanted = gradients(x, [weight], use=twice(F.linear), runs=2)
    taker = PostponedGradients(most_bytes=FAR)
    assert_equal(gradients(x, [weight], use=twice(linear), taker=taker, runs=2), wanted)
    assert taker.num_postponed == 4


@pytest.mark.parametrize("kind", ["hook", "post hook", "frozen", "not a leaf", "no grad"])
def test_what_cannot_wait_is_left_to_autograd(kind):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=kind != "frozen")
    seen = []
    if kind == "hook":
        weight.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    if kind == "post hook":
        weight.register_post_accumulate_grad_hook(seen.append)
    used = 2 * weight if kind == "not a leaf" else weight
    taker = PostponedGradients(most_bytes=FAR)
    with taker.taking(), torch.set_grad_enabled(kind != "no grad"):
        out = linear(x, used)
    if kind != "no grad":
        out.sum().backward()
    assert taker.num_postponed == 0
    assert len(seen) == ("hook" in kind)
    assert (weight.grad is not None) == (kind not in ("frozen", "no grad"))


def test_only_forwards_inside_put_anything_off():
    weight = torch.ones(2, 2, requires_grad=True)
    taker = PostponedGradients(most_bytes=FAR)
    with taker.taking():
        pass
    linear(torch.ones(1, 2), weight).sum().backward()
    assert taker.num_postponed == 0
    assert weight.grad is not None


@pytest.mark.parametrize(("uses", "cached"), [(1, True), (2, True), (3, True), (2, False)])
def test_gradients_in_half_precision_go_to_their_places_with_the_bits_of_autograd(uses, cached):
    """A narrow product is made wide where it is put; before others are added, where each use has a cast of its own."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 8), torch.randn(8, 8), torch.randn(8)

    def use(product):
        def model(x, *weights):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                for _ in range(uses):
                    x = product(x, *weights)
            return x

        return model

    _, *wanted = gradients(x, [weight, bias], use=use(F.linear))
    weights = [each.clone().requires_grad_() for each in (weight, bias)]
    places = {each: torch.full_like(each, float("nan")) for each in weights}
    taker = PostponedGradients(most_bytes=FAR)
    with taker.taking():
        use(linear)(x.clone().requires_grad_(), *weights).square().sum().backward()
    taken = list(taker.each(places))
    assert [id(each) for each in taken] == [id(weights[1]), id(weights[0])]
    assert all(each.grad is None for each in weights)
    assert_equal(list(places.values()), wanted)
