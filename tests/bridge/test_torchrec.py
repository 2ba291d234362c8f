"""The same model in TorchRec's DistributedModelParallel and through the bridge, on two gloo ranks: the same tables."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.bridge.their_model import CONFIGS, DIM, ROWS, STEPS, TheirModel, features, first_rows
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.extras
LR, EPS = 0.05, 1e-8


def in_torchrec(rank):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    configs = [
        EmbeddingConfig(
            name=c.name, embedding_dim=DIM, num_embeddings=ROWS[c.name], feature_names=c.feature_names
        )
        for c in CONFIGS
    ]
    tables = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
    sharder = EmbeddingCollectionSharder(fused_params=rule)
    plan = construct_module_sharding_plan(
        tables,
        {name: row_wise(compute_kernel="fused") for name in ROWS},
        sharder=sharder,
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        TheirModel(tables),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
    wanted = first_rows()
    held = {key.split(".")[-2]: value for key, value in model.state_dict().items() if "embeddings" in key}
    for name, value in held.items():
        shard = value.local_shards()[0]
        first = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(wanted[name]["weight"][first : first + len(shard.tensor)])
    dense = [param for name, param in model.named_parameters() if "mix" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    seconds = []
    for step in range(STEPS):
        batch = features(
            step, rank, lambda keys, values, lengths: KeyedJaggedTensor(keys, values, lengths=lengths)
        )
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    rows = {name: value.local_shards()[0].tensor.clone() for name, value in held.items()}
    state = model.fused_optimizer.state_dict()["state"]
    sums = {
        key.rpartition(".")[0]: value.local_shards()[0].tensor.clone()
        for parts in state.values()
        for key, value in parts.items()
    }
    return rows, sums, [param.detach().clone() for param in dense], sorted(seconds)[STEPS // 2]


def through_the_bridge(rank):
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    from freescale.bridge import BridgedCollection, require_torchrec
    from freescale.embedding import RowwiseAdagrad

    require_torchrec()
    collection = BridgedCollection(
        CONFIGS,
        optimizer=RowwiseAdagrad(eps=EPS),
        group=dist.group.WORLD,
        jagged=lambda values, lengths: JaggedTensor(values=values, lengths=lengths),
    )
    collection.load_tables(first_rows())
    model = TheirModel(collection)
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    seconds = []

    def make(keys, values, lengths):
        return KeyedJaggedTensor(keys, values, lengths=lengths)

    batches = (features(step, rank, make) for step in range(STEPS))
    with collection.pipeline(batches, kjt_of=lambda batch: batch) as pipe:
        start = time.perf_counter()
        for ready in pipe:
            optimizer.zero_grad()
            model(ready.batch).backward()
            for param in model.mix.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 2
            optimizer.step()
            pipe.update(ready, lr=LR)
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    tables = {name: collection.embedding.tables[name] for name in ROWS}
    rows = {name: table.weight.clone() for name, table in tables.items()}
    sums = {name: table.state["square_sum"][:, 0].clone() for name, table in tables.items()}
    return rows, sums, [param.detach() for param in model.mix.parameters()], sorted(seconds)[STEPS // 2]


def test_tables_and_dense_weights_are_those_of_torchrec():
    pytest.importorskip("torchrec")
    theirs, ours = run_on_ranks(in_torchrec, 2, timeout=200), run_on_ranks(through_the_bridge, 2, timeout=200)
    for rank in range(2):
        for part in (0, 1):
            for name, values in theirs[rank][part].items():
                torch.testing.assert_close(ours[rank][part][name], values, rtol=0, atol=1e-6)
        for mine, other in zip(ours[rank][2], theirs[rank][2], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    print(f"median step: TorchRec {1000 * theirs[0][3]:.2f} ms, bridge {1000 * ours[0][3]:.2f} ms")  # noqa: T201
