"""freescale.Dropout: masks that follow the sample, whoever computes it; and what it says where it cannot know."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import freescale
from freescale import Dropout, SequenceBatch, dropout_keys
from freescale.errors import ConfigError, FreeScaleError
from freescale.kernels import SequenceLayout
from freescale.kernels.dropout import key_of_step, token_keys
from freescale.model.heads import RetrievalHead
from freescale.model.parts.dropout import drawn_by_rank, dropout_batch, dropout_step, number_sites
from freescale.model.recommender import Recommender, make_encoder

LENGTHS, WIDTH = [3, 1, 6], 8


def make_batch(lengths=LENGTHS, rows=(5, 80, 2)) -> SequenceBatch:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = {"item_index": torch.arange(sum(lengths))}
    return SequenceBatch(offsets, tokens, {"row": torch.tensor(rows)})


def ones(batch) -> torch.Tensor:
    return torch.ones(batch.num_tokens, WIDTH)


def drop(module, x, batch, *, seed=1, step=0):
    with dropout_keys(seed=seed, step=step, batch=batch):
        return module(x)


def test_masks_follow_seed_step_and_site():
    batch = make_batch()
    first = drop(Dropout(0.5, site=0), ones(batch), batch)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(first, drop(Dropout(0.5, site=0), ones(batch), batch))
    others = [
        drop(Dropout(0.5, site=1), ones(batch), batch),
        drop(Dropout(0.5, site=0), ones(batch), batch, step=1),
        drop(Dropout(0.5, site=0), ones(batch), batch, seed=2),
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_a_sample_has_its_mask_whatever_stands_beside_it():
    batch, module = make_batch(), Dropout(0.5, site=3)
    together = drop(module, ones(batch), batch)
    for part, wanted in zip((batch.select([0]), batch.select([2])), together.split(LENGTHS)[::2]):
        assert torch.equal(drop(module, ones(part), part), wanted)


def test_tokens_fall_alike_padded_or_not():
    batch = make_batch()
    inside = torch.arange(6) < batch.lengths[:, None]
    padded = drop(Dropout(0.5, rows="padded", site=3), torch.ones(3, 6, WIDTH), batch)
    assert torch.equal(padded[inside], drop(Dropout(0.5, site=3), ones(batch), batch))


def test_one_row_a_sample_has_a_mask_of_its_own():
    batch = make_batch()
    found = drop(Dropout(0.5, rows="samples", site=3), torch.ones(3, 40), batch)
    alone = batch.select([1])
    assert torch.equal(found[1:2], drop(Dropout(0.5, rows="samples", site=3), torch.ones(1, 40), alone))
    assert len(set(map(tuple, found.tolist()))) == 3


def test_keys_can_be_given():
    batch = make_batch()
    keys = token_keys(torch.tensor([key_of_step(1, 0)]), batch.samples["row"], SequenceLayout(batch.offsets))
    module = Dropout(0.5, site=3)
    assert torch.equal(module(ones(batch), keys), drop(module, ones(batch), batch))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_and_nothing_asked(p, training):
    x = torch.ones(3, 4)
    assert Dropout(p).train(training)(x) is x


def test_it_says_what_it_misses():
    batch, module = make_batch(), Dropout(0.5, site=0)
    with pytest.raises(FreeScaleError, match="which samples it is given, and in which step") as caught:
        module(ones(batch))
    assert "dropout_keys" in str(caught.value)
    with pytest.raises(FreeScaleError, match="cannot tell the samples of this batch apart"):
        drop(module, ones(batch), SequenceBatch(batch.offsets))
    with pytest.raises(FreeScaleError, match="other rows than those of the current batch") as caught:
        drop(module, torch.ones(3, 6, WIDTH), batch)
    assert "(3, 6, 8) for (10,) tokens" in str(caught.value)
    with pytest.raises(FreeScaleError, match="where in a model it stands"):
        drop(Dropout(0.5), ones(batch), batch)


@pytest.mark.parametrize(("options", "message"), [({"p": 1.0}, "0 <= p < 1"), ({"rows": "row"}, "padded")])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Dropout(**options)


@pytest.mark.parametrize("kind", ["hstu", "sasrec", "llama"])
def test_every_site_of_a_model_has_its_own_number_and_none_is_saved(kind):
    encoder = make_encoder(kind, dim=4, layers=2, dropout=0.3, ffn={"kind": "dense", "hidden": 4})
    model = Recommender(encoder=encoder, head=RetrievalHead(), items=nn.Sequential(Dropout(0.1)))
    sites = [module.site for module in model.modules() if isinstance(module, Dropout)]
    assert sites == list(range(len(sites)))
    assert len(sites) >= 5 + 1
    assert not [module for module in model.modules() if type(module) is nn.Dropout]
    before = dict(model.encoder.named_modules())["layers.1"].state_dict().keys()
    assert not [name for name in before if "dropout" in name]
    number_sites(model.without_items())
    assert [m.site for m in model.encoder.modules() if isinstance(m, Dropout)] == sites[:-1]


class Own(nn.Module):
    """An encoder from outside, which computes its states again in the backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.drop, self.mix = freescale.Dropout(0.4), nn.Linear(WIDTH, WIDTH)
        self.again = again

    def forward(self, vectors, batch, layout):
        if self.again:
            return checkpoint(self._states, vectors, use_reentrant=False)
        return self._states(vectors)

    def _states(self, vectors):
        return self.drop(self.mix(vectors)).sin()


class Sum:
    """A head without weights."""

    def loss(self, states, rows, batch, layout):
        return (states * rows[batch.tokens["item_index"]]).sum()


def gradients(model, rows, parts):
    with dropout_step(torch.tensor([key_of_step(4, 2)])):
        for part in parts:
            model(rows, part).backward()
    found = [rows.grad, *(param.grad for param in model.parameters())]
    rows.grad = None
    model.zero_grad()
    return found


@pytest.mark.parametrize("again", [False, True])
def test_a_module_from_outside_learns_alike_in_micro_batches_and_computed_again(again):
    torch.manual_seed(0)
    rows = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64, requires_grad=True)
    model = Recommender(encoder=Own(again), head=Sum()).double()
    plain = Recommender(encoder=Own(False), head=Sum()).double()
    plain.load_state_dict(model.state_dict())
    wanted = gradients(plain, rows, [make_batch()])
    for found in (gradients(model, rows, [make_batch()]), gradients(model, rows, make_batch().split(3))):
        for ours, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_a_module_that_draws_by_rank_is_named():
    model = Recommender(encoder=Own(False), head=Sum())
    assert drawn_by_rank(model) == []
    model.encoder.late = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.1))
    assert "torch's dropout in encoder.late.1 draws masks by rank" in drawn_by_rank(model)[0]


def test_a_batch_inside_a_batch_gives_way_again():
    outer, inner, module = make_batch(), make_batch([2], rows=(7,)), Dropout(0.5, site=0)
    with dropout_keys(seed=1, step=0, batch=outer):
        before = module(ones(outer))
        with dropout_batch(inner, SequenceLayout(inner.offsets)):
            module(ones(inner))
        assert torch.equal(module(ones(outer)), before)
    with pytest.raises(FreeScaleError):
        module(ones(outer))


def test_a_key_that_is_filled_anew_draws_anew():
    # What a recorded step does: the same memory, another key.
    batch, module, key = make_batch(), Dropout(0.5, site=0), torch.zeros(1, dtype=torch.int64)
    found = []
    for step in (3, 4, 3):
        key.fill_(key_of_step(1, step))
        with dropout_step(key), dropout_batch(batch, SequenceLayout(batch.offsets)):
            found.append(module(ones(batch)))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], drop(module, ones(batch), batch, step=3))
