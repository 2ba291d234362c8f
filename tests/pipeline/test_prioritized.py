"""Prioritized communication gives the bits of the plain path, whatever the batches share."""

from __future__ import annotations

import pytest
import torch

from freescale.embedding.plan import TableSpec
from tests.pipeline.two_paths import (
    OPTIMIZERS,
    lanes_of,
    make_embedding,
    random_batches,
    state_bits,
    train_plainly,
    train_prioritized,
)
from tests.ranks import run_on_ranks


def specs_of(optimizer: str, dtype: torch.dtype = torch.float32) -> list[TableSpec]:
    return [
        TableSpec(
            name="item", num_rows=61, dim=7, optimizer=OPTIMIZERS[optimizer], dtype=dtype, init_std=1.0
        ),
        TableSpec(
            name="user", num_rows=13, dim=5, optimizer=OPTIMIZERS[optimizer], dtype=dtype, init_std=1.0
        ),
    ]


def compare(
    rank: int, num_ranks: int, optimizer: str, num_steps: int, seeds: list[int], options: dict
) -> list:
    """Whether losses and every bit of rows and state agree, for each seed; and the overlap met."""
    sockets, limit_mb = options.pop("sockets", False), options.pop("limit_mb", 0.0)
    specs = specs_of(optimizer, options.pop("dtype", torch.float32))
    lanes, met = lanes_of(sockets=sockets), []
    for seed in seeds:
        batches = random_batches(seed, specs, num_steps, rank, num_ranks)
        plain, ours = (make_embedding(specs, sockets=sockets, limit_mb=limit_mb) for _ in range(2))
        expected = train_plainly(plain, batches)
        losses, traffic = train_prioritized(ours, batches, lanes=lanes, check=True, **options)
        assert losses == expected, f"seed {seed}"
        assert state_bits(ours) == state_bits(plain), f"seed {seed}"
        met += [(each.shared_rows, each.distinct_rows, each.parked_rows) for each in traffic]
    return met


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_300_steps_have_the_bits_of_the_plain_path(num_ranks, optimizer):
    met = run_on_ranks(compare, num_ranks, num_ranks, optimizer, 300, [num_ranks], {}, timeout=100)
    shared = [sum(numbers) for numbers in zip(*met[0])]
    assert shared[0] > 100
    assert shared[1] > 2 * shared[0]
    assert shared[2] > 100


@pytest.mark.parametrize(
    "options",
    [
        {"sockets": True},
        {"limit_mb": 0.0005},
        {"dtype": torch.bfloat16},
        {"chunk_mb": 0.0001},
        {"dtype": torch.float64},
    ],
)
def test_on_every_transport_and_storage(options):
    run_on_ranks(compare, 3, 3, "adam", 40, [1, 2, 3], options, timeout=100)
