"""Masks that a recipe names: found by name, made with their options, and what they show."""

from __future__ import annotations

import pytest
import torch

from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout, make_mask_kind
from freescale.registry import names
from tests.foreign_masks import SameCategory

LAYOUT = SequenceLayout(torch.tensor([0, 5]))


def test_causal_needs_no_mask():
    assert make_mask_kind("causal") is None


def test_a_window_shows_so_many_tokens_back():
    mask = make_mask_kind("window", {"window": 2}).for_batch({}, LAYOUT)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    assert torch.equal(mask.allowed(0, 5, 0), (distance >= 0) & (distance <= 2))


def test_a_kind_from_outside_reads_columns_of_the_batch():
    kind = make_mask_kind("test_same_category", {"column": "genre"})
    mask = kind.for_batch({"genre": torch.tensor([0, 1, 0, 1, 0])}, LAYOUT)
    assert isinstance(mask, SameCategory)
    assert mask.per_token["category"].tolist() == [0, 1, 0, 1, 0]


def test_every_file_is_a_kind():
    assert names("mask")[:2] == ["causal", "window"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("widow", {}, "model.mask: there is no mask 'widow'(.|\n)*did you mean 'window'"),
        ("window", {}, "mask 'window' needs its option 'window'"),
        ("window", {"window": 0}, "model.window must be at least 1"),
        ("window", {"window": 1, "every": 2}, "mask 'window' has no option 'every'"),
        ("causal", {"window": 1}, "mask 'causal' has no option 'window'(.|\n)*allowed: none"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_mask_kind(name, options)
