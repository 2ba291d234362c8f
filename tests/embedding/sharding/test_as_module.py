"""ShardedEmbedding inside a torch.nn.Module: its rows are in the model's state, and go to any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from freescale import BalancedSampler, ShardedEmbedding, TableSpec
from freescale.embedding import RowwiseAdagrad
from freescale.errors import ConfigError, DataError, PlanError
from tests.ranks import run_on_ranks


class Scorer(nn.Module):
    def __init__(self, *, rows=11):
        super().__init__()
        torch.manual_seed(1)
        self.tables = ShardedEmbedding(
            [TableSpec(name="item", num_rows=rows, dim=3, optimizer=RowwiseAdagrad(), seed=2)]
        )
        self.out = nn.Linear(3, 1)

    def forward(self, rows):
        return self.out(self.tables({"item": rows})["item"]).sum()


def trained(model):
    model(torch.tensor([1, 4, 4, 10])).backward()
    model.tables.step(lr=0.1)
    return model


def whole(state):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def test_a_model_has_its_rows_in_its_state_and_not_among_its_parameters():
    model = trained(Scorer())
    state = model.state_dict()
    assert sorted(state) == ["out.bias", "out.weight", "tables.item.square_sum", "tables.item.weight"]
    assert [name for name, _ in model.named_parameters()] == ["out.weight", "out.bias"]
    assert "item: 11 rows x 3, 11 here" in repr(model)
    other = Scorer()
    assert not torch.equal(other.state_dict()["tables.item.weight"], state["tables.item.weight"])
    report = other.load_state_dict(state)
    assert not report.missing_keys
    assert not report.unexpected_keys
    for name, value in whole(other.state_dict()).items():
        assert torch.equal(value, state[name]), name


def on_ranks(rank, state):
    """The ranks of torch.distributed are found without being named."""
    model = Scorer()
    assert (model.tables.num_ranks, model.tables.rank) == (dist.get_world_size(), rank)
    assert len(model.tables.tables["item"].weight) < 11
    sampler = BalancedSampler([3] * 8, global_batch=4)
    assert (sampler.num_ranks, sampler.rank) == (dist.get_world_size(), rank)
    model.load_state_dict(state)
    again = Scorer()
    again.load_state_dict(model.state_dict())  # by parts, too
    return whole(again.state_dict())


def test_a_whole_state_is_loaded_by_several_ranks():
    state = whole(trained(Scorer()).state_dict())
    for back in run_on_ranks(on_ranks, 3, state):
        assert back.keys() == state.keys()
        assert all(torch.equal(value, back[name]) for name, value in state.items())


def test_a_state_of_other_tables_is_refused_as_torch_does():
    state = Scorer().state_dict()
    with pytest.raises(RuntimeError, match=r"tables\.item\.weight has another shape"):
        Scorer(rows=12).load_state_dict(state)
    del state["tables.item.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*tables\.item\.weight"):
        Scorer().load_state_dict(state)
    state["tables.user.weight"] = torch.ones(2, 3)
    report = Scorer().load_state_dict(state, strict=False)
    assert report.missing_keys == ["tables.item.weight"]
    assert report.unexpected_keys == ["tables.user.weight"]


@pytest.mark.parametrize("lr", [-1, float("nan"), float("inf"), "0.1", None])
def test_what_is_no_learning_rate_is_refused_and_nothing_is_lost(lr):
    model = Scorer()
    model(torch.tensor([1, 4])).backward()
    before = model.tables.tables["item"].weight.clone()
    with pytest.raises(ConfigError, match="no learning rate"):
        model.tables.step(lr=lr)
    assert torch.equal(model.tables.tables["item"].weight, before)
    model.tables.step(lr=0.1)
    assert not torch.equal(model.tables.tables["item"].weight, before), "the gradients are still there"


def test_mistakes_of_a_first_hour_are_told():
    spec = TableSpec(name="item", num_rows=5, dim=2, optimizer=RowwiseAdagrad())
    with pytest.raises(PlanError, match="a list of TableSpec"):
        ShardedEmbedding(spec)
    with pytest.raises(PlanError, match=r"an optimizer, not its class(?s:.*)RowwiseAdagrad\(\)"):
        TableSpec(name="item", num_rows=5, dim=2, optimizer=RowwiseAdagrad)
    with pytest.raises(PlanError, match=r"cannot be stored so(?s:.*)torch.int32(?s:.*)torch.bfloat16"):
        TableSpec(name="item", num_rows=5, dim=2, optimizer=RowwiseAdagrad(), dtype=torch.int32)
    with pytest.raises(DataError, match=r"names its tables(?s:.*)a Tensor(?s:.*)'item': rows"):
        ShardedEmbedding([spec])(torch.tensor([1]))
