"""BridgedCollection without TorchRec: a stand-in for its jagged tensors; prioritized and plain, bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from freescale.bridge import BridgedCollection, KeyedFeatures, require_torchrec
from freescale.embedding import SGD, RowwiseAdagrad
from freescale.errors import DataError, FreeScaleError
from tests.bridge.their_model import CONFIGS, STEPS, Config, TheirModel, features, first_rows
from tests.ranks import run_on_ranks


def trained(rank=0, num_ranks=1, way="plain", steps=STEPS, tables=None):
    group = dist.group.WORLD if num_ranks > 1 else None
    collection = BridgedCollection(CONFIGS, optimizer=RowwiseAdagrad(), group=group)
    collection.load_tables(tables or first_rows())
    model = TheirModel(collection)
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    batches = [features(step, rank, KeyedFeatures) for step in range(steps)]
    losses = []

    def learn(batch):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        for param in model.mix.parameters():
            if num_ranks > 1:
                dist.all_reduce(param.grad)
                param.grad /= num_ranks
        optimizer.step()
        losses.append(loss.item())

    if way == "plain":
        for batch in batches:
            learn(batch)
            collection.step(lr=0.05)
    else:
        with collection.pipeline(batches, kjt_of=lambda batch: batch, check=True) as pipe:
            for ready in pipe:
                learn(ready.batch)
                pipe.update(ready, lr=0.05)
    return losses, collection.whole_tables(), [param.detach() for param in model.mix.parameters()]


def same(one, other):
    assert one[0] == other[0]
    for name, parts in one[1].items():
        for part, values in parts.items():
            assert torch.equal(values, other[1][name][part]), (name, part)
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


def both_ways(rank, num_ranks):
    return [trained(rank, num_ranks, way) for way in ("plain", "prioritized")]


def test_prioritized_traffic_changes_no_bit_of_their_model():
    for plain, prioritized in run_on_ranks(both_ways, 2, 2):
        same(plain, prioritized)
        assert plain[0][-1] < plain[0][0]


def test_two_ranks_learn_what_one_does_from_both_their_samples():
    # One process, the samples of both ranks: the mean of the two means, as each has four samples.
    together = run_on_ranks(trained, 2, 2, "plain", 6)[0]
    alone = BridgedCollection(CONFIGS, optimizer=RowwiseAdagrad())
    alone.load_tables(first_rows())
    model = TheirModel(alone)
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = sum(model(features(step, rank, KeyedFeatures)) for rank in range(2)) / 2
        loss.backward()
        optimizer.step()
        alone.step(lr=0.05)
    for name, parts in alone.whole_tables().items():
        for part, values in parts.items():
            torch.testing.assert_close(values, together[1][name][part], rtol=1e-5, atol=1e-6)


def test_tables_go_in_and_out_bit_for_bit_on_another_number_of_ranks():
    _, tables, _ = trained(steps=3)
    assert tables["item"]["momentum1"].abs().sum() > 0
    for _, back, _ in run_on_ranks(trained, 3, 3, "plain", 0, tables):
        for name, parts in tables.items():
            for part, values in parts.items():
                assert torch.equal(values, back[name][part]), (name, part)


def test_a_feature_of_two_tables_and_one_that_is_missing():
    configs = [Config("a", 9, 4, ["x"]), Config("b", 9, 4, ["x", "y"])]
    collection = BridgedCollection(configs, optimizer=RowwiseAdagrad())
    given = KeyedFeatures(["x", "y"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1, 0]))
    found = collection(given)
    assert sorted(found) == ["x@a", "x@b", "y"]
    assert [len(found[name].values()) for name in ("x@a", "x@b", "y")] == [2, 2, 1]
    with pytest.raises(DataError, match="lacks features"):
        collection(KeyedFeatures(["x"], torch.tensor([1]), torch.tensor([1])))


def test_sums_for_an_optimizer_that_keeps_none_are_refused():
    with pytest.raises(DataError, match="keeps no sums"):
        BridgedCollection(CONFIGS, optimizer=SGD()).load_tables(first_rows())


def test_another_torchrec_or_none_is_refused(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    with pytest.raises(FreeScaleError, match=r"not been tried(.|\n)*1\.2\.3(.|\n)*1\.9\.2"):
        require_torchrec()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(FreeScaleError, match=r"not installed(.|\n)*pip install --no-deps torchrec==1\.9\.2"):
        require_torchrec()
