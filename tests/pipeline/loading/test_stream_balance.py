"""Streams of unknown lengths: what the ranks hold together stays the same, and the load becomes even."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.pipeline.loading.stream_balance import StreamBalancer
from tests.ranks import run_on_ranks


def stream(rank: int, num_batches: int) -> list[SequenceBatch]:
    rng = np.random.default_rng([rank, 5])
    batches = []
    for number in range(num_batches):
        lengths = np.minimum(rng.lognormal(3 + rank, 1, size=12), 500).astype(np.int64)
        ids = torch.arange(12) + 1000 * number + 100_000 * rank
        batches.append(
            SequenceBatch(
                offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
                tokens={
                    "item": torch.repeat_interleave(ids, torch.from_numpy(lengths)),
                    "action": torch.rand(lengths.sum()),
                },
                samples={"row": ids, "negatives": ids[:, None] + torch.arange(3)},
            )
        )
    return batches


def balance(rank: int, num_batches: list[int]) -> list[dict[str, Any]]:
    group = dist.new_group(backend="gloo")
    balancer = StreamBalancer(iter(stream(rank, num_batches[rank])), group=group)
    seen = []
    for one in balancer:
        batch = one.batch
        sizes = {int(row): int(length) for row, length in zip(batch.samples["row"], batch.lengths)}
        whole = torch.repeat_interleave(batch.samples["row"], batch.lengths)
        assert torch.equal(whole, batch.tokens["item"])
        assert torch.equal(batch.samples["negatives"][:, 1], batch.samples["row"] + 1)
        seen.append(
            {"sizes": sizes, "before": one.imbalance_before, "after": one.imbalance, "moved": one.moved}
        )
        seen[-1]["tokens"] = one.global_tokens
    return seen


@pytest.mark.parametrize("num_batches", [[3, 3, 3], [1, 4, 2]], ids=["equal streams", "uneven ends"])
def test_every_sample_is_on_exactly_one_rank_and_load_is_even(num_batches: list[int]) -> None:
    results = run_on_ranks(balance, 3, num_batches)
    assert [len(result) for result in results] == [max(num_batches)] * 3
    for step in range(max(num_batches)):
        together = [row for result in results for row in result[step]["sizes"]]
        expected = {
            int(row): int(length)
            for rank in range(3)
            if step < num_batches[rank]
            for batch in [stream(rank, num_batches[rank])[step]]
            for row, length in zip(batch.samples["row"], batch.lengths)
        }
        assert sorted(together) == sorted(expected)
        assert {k: v for result in results for k, v in result[step]["sizes"].items()} == expected
        assert results[0][step]["tokens"] == sum(expected.values())
        # Twelve samples on three ranks can hold one giant; with all streams alive the load must be even.
        assert results[0][step]["after"] < (1.05 if len(expected) == 36 else results[0][step]["before"])
        assert results[0][step]["before"] > 1.05
        assert results[0][step]["moved"] < 0.8


def with_pauses(rank: int, full: list[list[int]]) -> list[list[int]]:
    """Streams with empty batches between the full ones; the samples seen, step by step."""
    some = iter(stream(rank, sum(full[rank])))
    batches = [next(some) if yes else stream(rank, 1)[0].select([]) for yes in full[rank]]
    balancer = StreamBalancer(batches, group=dist.new_group(backend="gloo"))
    return [one.batch.samples["row"].tolist() for one in balancer]


@pytest.mark.parametrize(
    ("full", "sizes"),
    [
        ([[1, 0, 1], [1, 0, 1]], [24, 24]),
        ([[0, 0, 1], [1, 0, 0]], [12, 12]),
        ([[0, 1], [0, 0, 1, 0]], [12, 12]),
        ([[0], [0, 0]], []),
    ],
)
def test_an_empty_batch_is_not_the_end_of_the_stream(full: list[list[int]], sizes: list[int]) -> None:
    results = run_on_ranks(with_pauses, 2, full)
    steps = [sorted(first + second) for first, second in zip(*results, strict=True)]
    assert [len(rows) for rows in steps] == sizes
    wanted = [
        row
        for rank in range(2)
        for one in stream(rank, sum(full[rank]))
        for row in one.samples["row"].tolist()
    ]
    assert sorted(row for rows in steps for row in rows) == sorted(wanted)


def iterate_a_broken_stream(rank: int) -> str:
    def broken() -> Any:
        yield stream(rank, 1)[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError) as caught:
        list(StreamBalancer(broken(), group=dist.new_group(backend="gloo")))
    return str(caught.value)


def test_a_failing_stream_fails_where_it_is_iterated() -> None:
    assert run_on_ranks(iterate_a_broken_stream, 1) == ["the disk is gone"]
