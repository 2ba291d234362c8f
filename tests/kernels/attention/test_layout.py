"""Layouts: where the tokens of a jagged batch stand, in tiles and by the length of their sequences."""

from __future__ import annotations

import torch

from freescale.kernels import SequenceLayout


def test_tiles_cover_every_token_once():
    layout = SequenceLayout(torch.tensor([0, 0, 5, 70, 70, 198]))
    tiles = layout.token_tiles(64)
    assert tiles.tolist() == [[1, 0, 5], [2, 5, 64], [2, 69, 1], [4, 70, 64], [4, 134, 64]]
    assert layout.token_tiles(64) is tiles


def test_positions_reached_are_counted():
    layout = SequenceLayout(torch.tensor([0, 3, 3, 4, 9]))
    sequence, first, reach = layout.by_length
    assert sequence.tolist() == [3, 0, 2, 1]
    assert first.tolist() == [4, 0, 3, 3]
    assert reach.tolist() == [3, 2, 2, 1, 1]
    assert [len(x) for x in SequenceLayout(torch.tensor([0, 0])).by_length] == [1, 1, 0]
