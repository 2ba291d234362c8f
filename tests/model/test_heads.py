"""Heads against losses worked out one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.kernels import SequenceLayout, unit
from freescale.model.heads import RankingHead, RetrievalHead
from tests.effort import examples

DIM, NUM_ITEMS, NUM_NEGATIVES = 4, 7, 5


def make_batch(lengths, seed=0, num_negatives=NUM_NEGATIVES):
    """States, item vectors and a batch whose targets often are among the negatives."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    states = torch.randn(tokens, DIM, dtype=torch.float64, generator=generator).requires_grad_()
    items = torch.randn(NUM_ITEMS, DIM, dtype=torch.float64, generator=generator).requires_grad_()
    batch = SequenceBatch(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        tokens={
            "target_index": torch.randint(NUM_ITEMS, (tokens,), generator=generator),
            "target_action": torch.randint(1, 6, (tokens,), generator=generator).double(),
        },
        samples={
            "negative_index": torch.randint(NUM_ITEMS, (len(lengths), num_negatives), generator=generator)
        },
    )
    return states, items, batch


def run(head, states, items, batch):
    return head.loss(states, items, batch, SequenceLayout(batch.offsets))


def token_losses(states, items, batch, *, temperature, normalize):
    """-log(exp(positive) / (exp(positive) + sum of exp(negatives other than the target))) of every token."""

    def score(x, y):
        if normalize:
            x, y = x / x.square().sum().sqrt(), y / y.square().sum().sqrt()
        return (x @ y) / temperature

    losses = []
    for n, (a, b) in enumerate(zip(batch.offsets.tolist(), batch.offsets.tolist()[1:])):
        for i in range(a, b):
            target = int(batch.tokens["target_index"][i])
            rivals = [s for s in batch.samples["negative_index"][n].tolist() if s != target]
            logits = [score(states[i], items[slot]) for slot in (target, *rivals)]
            losses.append(torch.stack(logits).exp().sum().log() - logits[0])
    return losses


@examples(13, thorough=200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    normalize=st.booleans(),
    temperature=st.sampled_from([0.05, 1.0]),
    seed=st.integers(0, 999),
)
def test_sampled_softmax_and_its_gradients_token_by_token(lengths, normalize, temperature, seed):
    states, items, batch = make_batch(lengths, seed)
    got = run(RetrievalHead(temperature=temperature, normalize=normalize), states, items, batch)
    wanted = sum(token_losses(states, items, batch, temperature=temperature, normalize=normalize))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    for ours, truth in zip(
        torch.autograd.grad(got, [states, items]), torch.autograd.grad(wanted, [states, items])
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


def test_a_negative_that_is_the_target_does_not_count_against_it():
    states, items, batch = make_batch([3])
    all_hits = batch.with_tokens(target_index=torch.full((3,), 2)).with_samples(
        negative_index=torch.full((1, 5), 2)
    )
    assert run(RetrievalHead(), states, items, all_hits).item() == 0.0


def test_the_loss_is_a_sum_so_parts_add_up_to_the_whole():
    states, items, batch = make_batch([4, 0, 6, 3])
    for head in (RetrievalHead(), RankingHead(dim=DIM, thresholds=(3.5,)).double()):
        whole = run(head, states, items, batch)
        edges = [0, 4, 13]
        parts = [run(head, states[a:b], items, p) for a, b, p in zip(edges, edges[1:], batch_parts(batch))]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)


def batch_parts(batch):
    return batch.select([0, 1]), batch.select([2, 3])


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_of_zero_length_give_finite_losses_and_gradients(normalize):
    states, items, batch = make_batch([3, 2])
    states.data[1] = 0
    items.data[0] = 0
    loss = run(RetrievalHead(normalize=normalize), states, items, batch)
    loss.backward()
    assert loss.isfinite()
    assert states.grad.isfinite().all()
    assert items.grad.isfinite().all()


def test_no_tokens_give_a_loss_of_zero_that_can_go_backward():
    states, items, batch = make_batch([0, 0])
    for head in (RetrievalHead(), RankingHead(dim=DIM, thresholds=(3.5,)).double()):
        items.grad = None
        loss = run(head, states, items, batch)
        loss.backward()
        assert loss.item() == 0.0
        assert (items.grad == 0).all()
        assert all((param.grad == 0).all() for param in head.parameters())


def test_unit_vectors_have_length_one_and_are_at_least_float32():
    x = torch.randn(10, 3, dtype=torch.bfloat16)
    assert unit(x).dtype == torch.float32
    torch.testing.assert_close(unit(x).norm(dim=-1), torch.ones(10))
    assert unit(x.double()).dtype == torch.float64


@examples(8, thorough=200)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    thresholds=st.lists(st.sampled_from([0.5, 2.5, 3.5, 4.0]), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_ranking_loss_is_the_mean_over_tasks_of_cross_entropies(lengths, thresholds, seed):
    torch.manual_seed(seed)
    head = RankingHead(dim=DIM, thresholds=tuple(thresholds)).double()
    states, items, batch = make_batch(lengths, seed)
    wanted = 0.0
    for i, action in enumerate(batch.tokens["target_action"].tolist()):
        item = items[int(batch.tokens["target_index"][i])]
        hidden = head.mlp[0](torch.cat([states[i], item, states[i] * item]))
        logits = head.mlp[2](hidden * hidden.sigmoid()).tolist()
        for logit, threshold in zip(logits, thresholds):
            probability = 1 / (1 + math.exp(-logit))
            wanted -= math.log(probability if action > threshold else 1 - probability) / len(thresholds)
    assert run(head, states, items, batch).item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_labels_compare_whole_numbers_with_broken_thresholds():
    labels = RankingHead(dim=DIM, thresholds=(3.5, 4.0)).labels(torch.tensor([3, 4, 5]))
    assert labels.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_thresholds_are_settings_and_not_weights():
    assert "thresholds" not in RankingHead(dim=DIM, thresholds=(3.5,)).state_dict()
