"""One training step: the sum over ranks and micro-batches is the step of one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.balance.step_plan import StepPlan
from freescale.comm.world.ranks import Ranks
from freescale.data.batches.examples import Examples
from freescale.data.sources.synthetic import SyntheticSource
from freescale.embedding import Adam, DirectMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.errors import TrainingError
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender
from freescale.pipeline.loading.loader import PlannedBatch
from freescale.pipeline.schedule import PlainSchedule
from freescale.train.compute.owned_parameters import OwnedParameters
from freescale.train.compute.seeds import seed_random_numbers
from freescale.train.compute.step import TrainStep
from tests.ranks import run_on_ranks

ROWS, NUM_STEPS, DIM = 8, 3, 4


def rows_of(step: int, rank: int, num_ranks: int) -> list[int]:
    """Samples of a step, dealt out unevenly: with 3 ranks, the last one never has any."""
    everybody = list(range(step * ROWS, (step + 1) * ROWS))
    if num_ranks == 1:
        return everybody
    return [everybody[:3], everybody[3:], []][rank]


def make_examples() -> Examples:
    source = SyntheticSource(num_users=40, num_items=30, mean_length=10, max_length=20)
    return Examples(source=source, max_length=12, num_negatives=5)


def num_tokens(examples: Examples, rows) -> int:
    return int(examples.lengths()[rows].sum())


def train(ranks: Ranks, *, seed=0, dropout=0.0, steps=NUM_STEPS, poison=None, only_row=None, **options):
    """Losses of some steps, and every parameter after them."""
    examples = make_examples()
    torch.manual_seed(1)
    encoder = HSTU(dim=DIM, layers=1, max_length=12, dropout=dropout, time_bias=True)
    model = Recommender(encoder=encoder, head=RetrievalHead()).double()
    if poison is not None:
        poison(model)
    table = TableSpec(name="item", num_rows=31, dim=DIM, optimizer=Adam(), dtype=torch.float64)
    embedding = ShardedEmbedding([table], group=ranks.group)
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(
        model,
        optimizer,
        ranks=ranks,
        owned=OwnedParameters(model, ranks, lengths={}),
        lr=0.01,
        table_lr=0.02,
        lr_factor=lambda s: 1 / (s + 1),
        seed=seed,
        **options,
    )
    planned = []
    for n in range(steps):
        rows = np.array(rows_of(n, ranks.rank, ranks.num_ranks), dtype=np.int64)
        tokens = num_tokens(examples, rows_of(n, 0, 1))
        if only_row is not None:
            rows = np.array([only_row])
            tokens = num_tokens(examples, rows)
        plan = StepPlan(n, 0, rows, ROWS, tokens, 1.0, 1.0, "hash")
        planned.append(PlannedBatch(plan, examples.batch(rows, step=n)))
    schedule = PlainSchedule(iter(planned), embedding=embedding, id_map=DirectMap(31), device=ranks.device)
    results = [step.run(ready, schedule) for ready in schedule]
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    block = embedding.plans["item"].block(ranks.rank)
    return (
        [r.loss for r in results],
        [r.grad_norm for r in results],
        parameters,
        (block, embedding.tables["item"].weight),
    )


def alone(**options):
    return train(Ranks(0, 1, torch.device("cpu")), **options)


def on_rank(rank: int, num_ranks: int, options):
    group = dist.group.WORLD
    return train(Ranks(rank, num_ranks, torch.device("cpu"), group=group, control=group), **options)


def assert_same(parameters, wanted):
    for name, values in wanted.items():
        torch.testing.assert_close(parameters[name], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"accumulate": 3}])
def test_ranks_with_few_or_no_samples_take_the_step_of_one(num_ranks, options):
    losses, norms, parameters, (_, weight) = alone(clip_norm=options.get("clip_norm"))
    parts = run_on_ranks(on_rank, num_ranks, num_ranks, options)
    assert np.sum([part[0] for part in parts], axis=0) == pytest.approx(losses, rel=1e-10)
    for part in parts:
        assert part[1] == (norms if norms[0] is None else pytest.approx(norms, rel=1e-9))
        assert_same(part[2], parameters)
        (first, count), rows = part[3]
        torch.testing.assert_close(rows, weight[first : first + count], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("accumulate", [2, 5, 20])
def test_micro_batches_take_the_step_of_the_whole_batch(accumulate):
    losses, _, parameters, (_, weight) = alone()
    got = alone(accumulate=accumulate)
    assert got[0] == pytest.approx(losses, rel=1e-10)
    assert_same(got[2], parameters)
    torch.testing.assert_close(got[3][1], weight, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_the_tokens_of_the_global_batch():
    examples, rows = make_examples(), rows_of(0, 0, 1)
    apart = [alone(steps=1, only_row=row)[0][0] * num_tokens(examples, [row]) for row in rows]
    assert alone(steps=1)[0] == pytest.approx([sum(apart) / num_tokens(examples, rows)])


def test_the_loss_falls_and_the_gradient_is_clipped():
    losses, norms, _, _ = alone(steps=4, clip_norm=1e-3)
    assert losses[-1] < losses[0]
    assert min(norms) > 1e-3


@pytest.mark.parametrize("seed", [0, 20_260_101, 2**63 - 1])
def test_dropout_follows_from_the_seed_whatever_its_size(seed):
    first, again = (alone(seed=seed, dropout=0.5)[0] for _ in range(2))
    assert first == again
    assert first != alone(seed=seed + 1 if seed < 2**62 else 5, dropout=0.5)[0]


def test_a_loss_that_is_not_a_number_names_step_batch_and_histories():
    def poison(model):
        model.encoder.layers[0].uvqk.data[0, 0] = float("nan")

    with pytest.raises(TrainingError, match="the loss is nan at step 1") as caught:
        alone(poison=poison)
    assert "batch hash: histories [0, 1, 2, 3, 4, ... 8 in all] on rank 0" in str(caught.value)
    assert "optim.lr" in str(caught.value)


def test_memory_that_ran_out_names_the_batch_and_a_way_on():
    """Torch's own words name processes and bytes, and nothing that a recipe has."""

    def fill(model):
        def run_out(*given):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf that ...")

        model.register_forward_pre_hook(run_out)

    with pytest.raises(TrainingError, match="the memory of the GPU was not enough for step 1") as caught:
        alone(poison=fill)
    assert "8 samples with" in str(caught.value)
    assert "Tried to allocate 2.00 GiB." in str(caught.value)
    assert "Of that" not in str(caught.value)
    assert "optim.accumulate=2 " in str(caught.value)
    assert "run.capture" not in str(caught.value)


def test_random_numbers_of_a_step_are_those_of_torchs_own_seed():
    seed = 2**63 - 25
    torch.manual_seed(seed)
    wanted = torch.rand(100), torch.nn.functional.dropout(torch.ones(1000))
    torch.rand(7)
    seed_random_numbers(seed, torch.device("cpu"))
    assert torch.equal(torch.rand(100), wanted[0])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(1000)), wanted[1])
