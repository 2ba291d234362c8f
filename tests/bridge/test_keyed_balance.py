"""Balance for KeyedJaggedTensors, by the stand-in: there and back, and the same rows as one rank learns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from freescale.bridge import BridgedCollection, KeyedFeatures, KJTBalancer
from freescale.bridge.keyed_balance import from_samples, to_samples
from freescale.embedding import SGD
from freescale.errors import DataError
from tests.bridge.their_model import CONFIGS, KEYS, ROWS, TheirModel, first_rows
from tests.ranks import run_on_ranks

LISTS = st.integers(1, 3).flatmap(
    lambda num_keys: st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=num_keys, max_size=num_keys), max_size=5
    )
)


def keyed(samples, *, weighted=False, num_keys=None):
    """Of lists by sample and feature."""
    num_keys = num_keys or len(samples[0])
    lists = [sample[key] for key in range(num_keys) for sample in samples]
    values = torch.tensor([each for one in lists for each in one], dtype=torch.int64)
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int32)
    weights = torch.arange(len(values)) / 7 if weighted else None
    return KeyedFeatures([f"f{key}" for key in range(num_keys)], values, lengths, weights)


@given(LISTS, st.booleans())
def test_features_turned_sample_by_sample_turn_back(samples, weighted):
    kjt = keyed(samples, weighted=weighted, num_keys=len(samples[0]) if samples else 2)
    label = torch.arange(len(samples)).float()
    batch = to_samples(kjt, {"label": label})
    by_sample = [[each for part in sample for each in part] for sample in samples]
    assert [part.tolist() for part in batch.tokens["values"].split(batch.lengths.tolist())] == by_sample
    back, dense = from_samples(batch, like=kjt)
    assert back.keys() == kjt.keys()
    assert torch.equal(back.values(), kjt.values())
    assert torch.equal(back.lengths(), kjt.lengths())
    assert back.lengths().dtype == torch.int32
    assert torch.equal(dense["label"], label)
    if weighted:
        assert torch.equal(back.weights_or_none(), kjt.weights_or_none())


def sample(step, number):
    """Ids of the three features of a sample of the stream, long-tailed: those of the first rank are longer."""
    drawn = torch.Generator().manual_seed(1000 * step + number)
    longest = 30 if number < 4 else 4
    lengths = torch.randint(0, longest, (2,), generator=drawn)
    items = [torch.randint(ROWS["item"], (int(n),), generator=drawn).tolist() for n in lengths]
    return [*items, [number % ROWS["user"]]]


def batch_of(step, numbers):
    kjt = keyed([sample(step, number) for number in numbers], num_keys=3)
    kjt = KeyedFeatures(KEYS, kjt.values(), kjt.lengths())
    return SimpleNamespace(kjt=kjt, who=torch.tensor(numbers))


class PerSample(TheirModel):
    """One loss for each sample."""

    def forward(self, kjt):
        found = self.tables(kjt)
        pooled = [self.sums(found[key]) for key in KEYS]
        return self.mix(torch.cat(pooled, dim=1)).flatten().square()

    @staticmethod
    def sums(feature):
        lengths = feature.lengths().long()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        vectors = feature.values()
        return vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, owner, vectors)


def learn(rank, num_ranks, steps=6, prioritized=False):
    group = dist.group.WORLD if num_ranks > 1 else None
    tables = BridgedCollection(CONFIGS, optimizer=SGD(), group=group)
    tables.load_tables({name: {"weight": parts["weight"]} for name, parts in first_rows().items()})
    model, seen = PerSample(tables), []
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.01)
    if num_ranks == 1:
        batches = [
            SimpleNamespace(kjt=batch.kjt, dense={"who": batch.who}, num_samples=8, scale=1 / 8, imbalance=1)
            for batch in (batch_of(step, list(range(8))) for step in range(steps))
        ]
    else:
        mine = (batch_of(step, list(range(4 * rank, 4 * rank + 4))) for step in range(steps))
        batches = KJTBalancer(
            mine,
            group=dist.new_group(backend="gloo"),
            kjt_of=lambda batch: batch.kjt,
            dense_of=lambda batch: {"who": batch.who},
            weigh=["seen", "wanted"],
        )

    def step(ready):
        optimizer.zero_grad()
        (model(ready.kjt)[: ready.num_samples].sum() * ready.scale).backward()
        if num_ranks > 1:
            for param in model.mix.parameters():
                dist.all_reduce(param.grad)
                param.grad /= num_ranks
        optimizer.step()
        seen.append((sorted(ready.dense["who"][: ready.num_samples].tolist()), ready.imbalance))

    if prioritized:
        with tables.pipeline(batches, kjt_of=lambda ready: ready.kjt) as pipe:
            for ready in pipe:
                step(ready.batch)
                pipe.update(ready, lr=0.01)
    else:
        for ready in batches:
            step(ready)
            tables.step(lr=0.01)
    return tables.whole_tables(), [param.detach() for param in model.mix.parameters()], seen


def balanced_both_ways(rank):
    return [learn(rank, 2, prioritized=way) for way in (False, True)]


def test_balanced_ranks_learn_what_one_rank_learns_from_the_same_samples():
    alone, dense, _ = learn(0, 1)
    results = run_on_ranks(balanced_both_ways, 2)
    for way in range(2):
        for step in range(6):
            parts = [result[way][2][step][0] for result in results]
            assert sorted(parts[0] + parts[1]) == list(range(8))
            assert all(parts)
        for tables, mix, seen in (result[way] for result in results):
            assert max(imbalance for _, imbalance in seen) < 1.6  # 1.8 as they arrive
            for name, parts in alone.items():
                torch.testing.assert_close(tables[name]["weight"], parts["weight"], rtol=0, atol=1e-6)
            for mine, other in zip(mix, dense, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def few(rank):
    samples = [[[[1, 2], [3]]], []][rank]
    balancer = KJTBalancer(
        [keyed(samples, num_keys=2)],
        group=dist.group.WORLD,
        kjt_of=lambda batch: batch,
        dense_of=lambda batch: {"label": torch.ones(len(samples), 2)},
    )
    return [
        (ready.num_samples, ready.kjt.lengths().tolist(), ready.dense["label"].tolist(), ready.scale)
        for ready in balancer
    ]


def test_a_rank_without_samples_gets_a_blank_one():
    (full,), (blank,) = run_on_ranks(few, 2)
    assert full == (1, [2, 1], [[1.0, 1.0]], 2.0)
    assert blank == (0, [0, 0], [[0.0, 0.0]], 2.0)


def test_what_cannot_be_turned_is_refused():
    kjt = keyed([[[1], [2]]])
    with pytest.raises(DataError, match="one entry a sample"):
        to_samples(kjt, {"label": torch.ones(3)})
    uneven = SimpleNamespace(
        keys=lambda: ["a", "b"],
        lengths=lambda: torch.ones(3, dtype=torch.int64),
        values=lambda: torch.ones(3),
        weights_or_none=lambda: None,
    )
    with pytest.raises(DataError, match="variable batch sizes"):
        to_samples(uneven)
