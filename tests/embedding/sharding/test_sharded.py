"""ShardedEmbedding: alone it is a dense table, on many ranks it is what it is alone."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from freescale.embedding import SGD, Adam, RowwiseAdagrad
from freescale.embedding.optimizer import updated
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.request import exchange_ids
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.embedding.tables.table import EmbeddingTable
from freescale.errors import DataError, TrainingError
from tests.effort import examples, slow
from tests.ranks import run_on_ranks

OPTIMIZERS = [SGD(), RowwiseAdagrad(eps=1e-6), Adam(eps=1e-6)]


def spec(num_rows=10, dim=3, optimizer=None, name="item", dtype=torch.float64, **more):
    return TableSpec(
        name=name, num_rows=num_rows, dim=dim, optimizer=optimizer or SGD(), dtype=dtype, init_std=1.0, **more
    )


def loss_of(vectors: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient depends on the value and on where in the global batch an id stands."""
    weight = torch.cos(place.double())[..., None].to(vectors.dtype)
    return (weight * vectors).sum() + (weight * vectors.square()).sum()


# Alone, against a dense parameter.


@examples(20, thorough=200)
@given(
    batches=st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4),
    optimizer=st.sampled_from(OPTIMIZERS),
)
def test_alone_it_is_a_dense_parameter_updated_on_the_rows_touched(batches, optimizer):
    embedding = ShardedEmbedding([spec(optimizer=optimizer)])
    weight = EmbeddingTable(10, 3, optimizer=SGD(), init_std=1.0, dtype=torch.float64).weight
    state = {n: torch.zeros(s, dtype=torch.float64) for n, s in optimizer.state_shapes(10, 3).items()}
    for step, batch in enumerate(batches, start=1):
        ids, place = torch.tensor(batch, dtype=torch.int64), torch.arange(len(batch))
        vectors = embedding({"item": ids})["item"]
        torch.testing.assert_close(vectors, weight[ids], rtol=0, atol=1e-12)
        loss_of(vectors, place).backward()
        embedding.step(lr=0.1)

        dense = weight.clone().requires_grad_()
        loss_of(dense[ids], place).backward()
        touched = sorted(set(batch))
        part = {name: values[touched] for name, values in state.items()}
        weight[touched] = updated(optimizer, weight[touched], part, dense.grad[touched], lr=0.1, step=step)
        for name, values in part.items():
            state[name][touched] = values
    got = embedding.state_dict()
    torch.testing.assert_close(got["item.weight"], weight, rtol=0, atol=1e-12)
    for name, values in state.items():
        torch.testing.assert_close(got[f"item.{name}"], values, rtol=0, atol=1e-12)


def test_a_backward_after_step_is_refused_not_lost():
    embedding = ShardedEmbedding([spec()])
    early, late = (embedding({"item": torch.tensor([1, 2])})["item"] for _ in range(2))
    early.sum().backward()
    embedding.step(lr=0.1)
    with pytest.raises(TrainingError, match="'item' comes after the `step`"):
        late.sum().backward()
    embedding({"item": torch.tensor([3])})["item"].sum().backward()
    embedding.step(lr=0.1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_calls_in_one_step_are_one_update(optimizer):
    once, twice = (ShardedEmbedding([spec(optimizer=optimizer)]) for _ in range(2))
    for _ in range(2):
        ids = torch.tensor([1, 2, 2, 3, 2, 5])
        loss_of(once({"item": ids})["item"], torch.arange(6)).backward()
        for part in (slice(0, 3), slice(3, 6)):
            loss_of(twice({"item": ids[part]})["item"], torch.arange(6)[part]).backward()
        once.step(lr=0.1)
        twice.step(lr=0.1)
    for name, values in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[name], values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_looking_without_gradients_does_not_age_the_rows(optimizer):
    quiet, looked_at = (ShardedEmbedding([spec(optimizer=optimizer)]) for _ in range(2))
    for _ in range(2):
        for embedding in (quiet, looked_at):
            loss_of(embedding({"item": torch.tensor([1, 2])})["item"], torch.arange(2)).backward()
            if embedding is looked_at:
                with torch.no_grad():
                    embedding({"item": torch.tensor([1, 7])})
            embedding.step(lr=0.1)
    for name, values in quiet.state_dict().items():
        assert torch.equal(looked_at.state_dict()[name], values)


def test_ids_keep_their_shape_and_may_be_narrow():
    embedding = ShardedEmbedding([spec()])
    ids = torch.tensor([[1, 1], [9, 0], [2, 1]])
    assert torch.equal(embedding({"item": ids})["item"], embedding.tables["item"].weight[ids])
    assert torch.equal(embedding({"item": ids.int()})["item"], embedding.tables["item"].weight[ids])
    assert embedding({"item": ids[:0]})["item"].shape == (0, 2, 3)


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_row_outside_the_table_is_refused_by_name(bad):
    embedding = ShardedEmbedding([spec(name="genre")])
    with pytest.raises(DataError, match=f"row {bad} lies outside table 'genre'") as caught:
        embedding({"genre": torch.tensor([3, bad, 4])})
    assert "0 to 9" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "got"), [(torch.tensor([1.5]), "float32"), ([1, 2], "a list"), (torch.tensor([True]), "bool")]
)
def test_rows_must_be_whole_numbers_in_a_tensor(rows, got):
    embedding = ShardedEmbedding([spec()])
    with pytest.raises(DataError, match=rf"rows must be whole numbers in a tensor\n.*{got}"):
        embedding({"item": rows})
    with pytest.raises(DataError, match="rows must be whole numbers"):
        exchange_ids(embedding.plans["item"], rows, channel=embedding.transport)


def test_a_table_that_is_not_there_is_refused_with_those_that_are():
    embedding = ShardedEmbedding([spec(name="item"), spec(name="genre")])
    with pytest.raises(DataError, match=r"no such table\n.*'j'\n.*'item', 'genre'"):
        embedding({"j": torch.tensor([1])})
    with pytest.raises(DataError, match="no such table"):
        embedding.find("j", torch.tensor([1]))


# On many ranks, against the same module alone.


def test_distinct_rows_can_be_found_before_the_rows_change():
    embedding = ShardedEmbedding([spec(optimizer=SGD())])
    asked = torch.tensor([[7, 2], [7, 0]])
    found = embedding.find("item", asked)
    assert found.unique.tolist() == [0, 2, 7]
    assert found.inverse.tolist() == [[2, 1], [2, 0]]
    embedding({"item": asked})["item"].sum().backward()
    embedding.step(lr=0.5)
    ahead, now = embedding.lookup("item", found), embedding.lookup("item", asked)
    assert torch.equal(ahead.rows, now.rows)
    assert torch.equal(ahead.rows, embedding.tables["item"].weight[[0, 2, 7]])
    assert torch.equal(ahead.inverse, now.inverse)
    with pytest.raises(DataError, match="10"):
        embedding.find("item", torch.tensor([3, 10]))


def make_case(seed: int, num_ranks: int):
    """Tables, the replication limit, and ids[step][table][call][rank], from a seed alone."""
    rng = random.Random(seed)
    specs = [
        spec(
            num_rows=rng.choice([1, 2, 3, 7, 16, 40]),
            dim=rng.randint(1, 5),
            optimizer=rng.choice(OPTIMIZERS),
            name=f"table{n}",
            seed=n,
        )
        for n in range(rng.randint(1, 3))
    ]
    limit_mb = rng.choice([0.0, 0.0, 0.0005, 1.0])
    batches = [
        {s.name: [make_ids(rng, s.num_rows, num_ranks) for _ in range(rng.choice([1, 1, 2]))] for s in specs}
        for _ in range(3)
    ]
    return specs, limit_mb, batches


def make_ids(rng: random.Random, num_rows: int, num_ranks: int) -> list[list[int]]:
    """Ids of each rank: spread out, all on one owner, all the same, on some ranks only, or none at all."""
    kind = rng.choice(["spread", "spread", "one owner", "same", "some ranks", "none"])
    block = -(-num_rows // num_ranks)
    first = min(rng.randrange(num_ranks) * block, num_rows - 1)
    owned = range(first, min(first + block, num_rows))
    pool = {"one owner": owned, "same": [rng.randrange(num_rows)]}.get(kind, range(num_rows))
    sizes = [rng.randint(0, 12) if kind != "none" else 0 for _ in range(num_ranks)]
    if kind == "some ranks":
        sizes = [size if rng.random() < 0.5 else 0 for size in sizes]
    return [[rng.choice(pool) for _ in range(size)] for size in sizes]


def advance(
    embedding: ShardedEmbedding, batch, ranks: list[int], *, lr: float, factor=1.0
) -> list[torch.Tensor]:
    """One step on the ids of these ranks, with the loss times a factor; the vectors of every call."""
    seen = []
    calls = max(len(calls) for calls in batch.values())
    for call in range(calls):
        asked, places = {}, {}
        for name, by_call in batch.items():
            if call < len(by_call):
                by_rank = by_call[call]
                starts = [sum(len(ids) for ids in by_rank[:rank]) for rank in range(len(by_rank))]
                asked[name] = torch.tensor([i for rank in ranks for i in by_rank[rank]], dtype=torch.int64)
                places[name] = torch.cat(
                    [torch.arange(starts[rank], starts[rank] + len(by_rank[rank])) for rank in ranks]
                )
        vectors = embedding(asked)
        (factor * sum(loss_of(vectors[name], places[name]) for name in vectors)).backward()
        seen += [vectors[name].detach() for name in sorted(vectors)]
    embedding.step(lr=lr)
    return seen


def held_here(embedding: ShardedEmbedding) -> dict[str, tuple[torch.Tensor, slice]]:
    """The part of every state tensor that this rank holds, and where it stands in the whole."""
    parts = {}
    for name, values in embedding.state_dict().items():
        first, count = embedding.plans[name.split(".")[0]].block(embedding.rank)
        local = values.to_local() if isinstance(values, DTensor) else values
        parts[name] = local, slice(first, first + count)
    return parts


def compare_many(rank: int, num_ranks: int, seeds: range) -> int:
    """Run every case on all ranks and alone, and compare everything there is; the number of sharded tables."""
    num_sharded = 0
    for seed in seeds:
        specs, limit_mb, batches = make_case(seed, num_ranks)
        sharded = ShardedEmbedding(specs, group=dist.group.WORLD, replicate_below_mb=limit_mb)
        alone = ShardedEmbedding(specs, group=None)
        num_sharded += sum(not plan.replicated for plan in sharded.plans.values())
        for step, batch in enumerate(batches):
            # A gradient of zero still ages the moments of the rows looked up.
            how = {"lr": 0.1 / (step + 1), "factor": float(seed % 3 != 0 or step != 1)}
            got = advance(sharded, batch, [rank], **how)
            wanted = advance(alone, batch, list(range(num_ranks)), **how)
            calls = [
                by_call[call]
                for call in range(2)
                for _, by_call in sorted(batch.items())
                if call < len(by_call)
            ]
            for ours, everybody, by_rank in zip(got, wanted, calls, strict=True):
                start = sum(len(ids) for ids in by_rank[:rank])
                part = everybody[start : start + len(by_rank[rank])]
                torch.testing.assert_close(
                    ours, part, rtol=0, atol=1e-12, msg=lambda m, s=seed: f"case {s}: {m}"
                )
        everything = alone.state_dict()
        for name, (ours, here) in held_here(sharded).items():
            where = f"case {seed}, {name}"
            torch.testing.assert_close(
                ours, everything.pop(name)[here], rtol=0, atol=1e-12, msg=lambda m, w=where: f"{w}: {m}"
            )
        assert not everything
    return num_sharded


@pytest.mark.parametrize("num_ranks", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("seeds", [range(10), slow(range(50))], ids=["few", "many"])
def test_any_number_of_ranks_is_the_module_alone(num_ranks, seeds):
    num_sharded = run_on_ranks(compare_many, num_ranks, num_ranks, seeds)
    assert num_sharded[0] > 0.4 * len(seeds) or num_ranks == 1


def check_state(rank: int, num_ranks: int) -> None:
    embedding = ShardedEmbedding(
        [spec(11, 3, Adam(), name="large"), spec(2, 3, Adam(), name="small")],
        group=dist.group.WORLD,
        replicate_below_mb=200 / 2**20,
    )
    state = embedding.state_dict()
    assert sorted(state) == sorted(
        f"{t}.{p}" for t in ("large", "small") for p in ("weight", "moment1", "moment2")
    )
    assert not isinstance(state["small.weight"], DTensor)
    assert state["large.weight"].shape == (11, 3)
    first, count = embedding.plans["large"].block(rank)
    local = state["large.weight"].to_local()
    assert local.data_ptr() == embedding.tables["large"].weight.data_ptr() or count == 0
    everything = EmbeddingTable(11, 3, optimizer=SGD(), init_std=1.0, dtype=torch.float64).weight
    assert torch.equal(local, everything[first : first + count])
    assert torch.equal(state["large.weight"].full_tensor(), everything)
    assert embedding.memory_mib() * 2**20 == (count + 2) * 3 * 8 * 3


@pytest.mark.parametrize("num_ranks", [3, slow(2), slow(4)])
def test_the_state_is_a_global_view_of_the_local_rows(num_ranks):
    run_on_ranks(check_state, num_ranks, num_ranks)


def check_refusal(rank: int, bad: int) -> str:
    """Every rank asks for the bad row, so that none waits for the others."""
    embedding = ShardedEmbedding([spec(10)], group=dist.group.WORLD)
    with pytest.raises(DataError) as caught:
        embedding({"item": torch.tensor([rank, bad])})
    return str(caught.value)


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_row_outside_a_sharded_table_is_refused(bad):
    for message in run_on_ranks(check_refusal, 2, bad):
        assert f"row {bad} lies outside table 'item'" in message


def check_bfloat16(rank: int, num_ranks: int, replicate_below_mb: float) -> None:
    """Ids that no two ranks share, so that sums are exact and the result must be equal to the last bit."""
    tables = [spec(40, 4, Adam(), dtype=torch.bfloat16)]
    sharded = ShardedEmbedding(tables, group=dist.group.WORLD, replicate_below_mb=replicate_below_mb)
    alone = ShardedEmbedding(tables, group=None)
    by_rank = [list(range(r, 40, num_ranks)) for r in range(num_ranks)]
    for _ in range(3):
        advance(sharded, {"item": [by_rank]}, [rank], lr=0.01)
        advance(alone, {"item": [by_rank]}, list(range(num_ranks)), lr=0.01)
    for name, (ours, here) in held_here(sharded).items():
        assert torch.equal(ours, alone.state_dict()[name][here]), name


@pytest.mark.parametrize("replicate_below_mb", [0.0, 1.0])
def test_bfloat16_rows_are_rounded_alike_on_any_number_of_ranks(replicate_below_mb):
    run_on_ranks(check_bfloat16, 3, 3, replicate_below_mb)


def trained_bits(rank: int) -> bytes:
    embedding = ShardedEmbedding([spec(5, 3, Adam(), dtype=torch.float32)], group=dist.group.WORLD)
    rng = random.Random(rank)
    for _ in range(5):
        ids = torch.tensor([rng.randrange(5) for _ in range(200)])
        loss_of(embedding({"item": ids})["item"], torch.arange(200) + rank).backward()
        embedding.step(lr=0.1)
    return embedding.tables["item"].weight.numpy().tobytes()


def test_the_same_run_gives_the_same_bits():
    first, second = (run_on_ranks(trained_bits, 3) for _ in range(2))
    assert first == second


def _whole(embedding):
    return {
        path: (values.full_tensor() if isinstance(values, DTensor) else values).clone()
        for path, values in embedding.state_dict().items()
    }


def _loaded(rank, state, group):
    tables = [
        spec(num_rows=12, optimizer=Adam(), seed=5, row_group=group),
        spec(name="b", num_rows=4, seed=6),
    ]
    embedding = ShardedEmbedding(tables, group=dist.group.WORLD)
    embedding.load_state_dict(state)
    whole = _whole(embedding)
    other = ShardedEmbedding(tables, group=dist.group.WORLD)
    other.load_state_dict(embedding.state_dict())  # of as many ranks: every rank its own part
    assert all(torch.equal(values, whole[path]) for path, values in _whole(other).items())
    return whole


@pytest.mark.parametrize("group", [1, 2])
def test_a_state_goes_into_any_number_of_ranks(group):
    tables = [spec(num_rows=12, optimizer=Adam(), row_group=group), spec(name="b", num_rows=4)]
    alone = ShardedEmbedding(tables)
    alone({"item": torch.tensor([1, 5, 5]), "b": torch.tensor([2])})["item"].sum().backward()
    alone.step(lr=0.1)
    state = _whole(alone)
    for whole in run_on_ranks(_loaded, 3, state, group):
        assert all(torch.equal(values, state[path]) for path, values in whole.items())
    with pytest.raises(DataError, match="state of other tables"):
        alone.load_state_dict({})
    with pytest.raises(DataError, match=r"item\.weight has another shape"):
        alone.load_state_dict({**state, "item.weight": torch.zeros(3, 3)})
