"""Heads too wide for the kernels: said, with a number that would do, and not recorded as CUDA graphs."""

from types import SimpleNamespace

import pytest

from freescale.model import HSTU, Recommender, RetrievalHead
from freescale.recipe import load_config
from freescale.recipe.building.capture import why_not
from freescale.recipe.building.plain_attention import plain_attention


def built(dim: int, heads: int):
    config = load_config(None, [f"model.dim={dim}", f"model.heads={heads}"])
    encoder = HSTU(dim=dim, layers=1, heads=heads, max_length=8)
    return config, Recommender(encoder=encoder, head=RetrievalHead())


@pytest.mark.parametrize(("dim", "heads", "enough"), [(512, 1, 2), (768, 1, 3), (1542, 2, 257)])
def test_wide_heads_are_told_with_a_number_that_would_do(dim: int, heads: int, enough: int):
    config, model = built(dim, heads)
    told = plain_attention(config, model, kind="cuda")
    assert told is not None
    assert f"model.heads={enough} would do" in told
    assert f"{dim // heads} wide" in told
    assert (
        why_not(config, model, SimpleNamespace(features=None, learns=False))
        == "attention is computed in plain PyTorch"
    )


def test_others_are_not():
    assert plain_attention(*built(512, 2), kind="cuda") is None
    assert plain_attention(*built(512, 1), kind="cpu") is None
