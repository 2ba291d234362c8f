"""Models inside TorchRec itself: the same collection row-wise over the ranks, with its fused row-wise Adagrad."""

from __future__ import annotations

import torch

from tests.bridge.their_model import CONFIGS

LR, EPS = 0.05, 1e-8


def keyed(keys, values, lengths):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(keys, values, lengths=lengths)


def sharded(make_model, *, configs=CONFIGS, world_size=2):
    """A model over an EmbeddingCollection of these tables, in DistributedModelParallel."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    theirs = [
        EmbeddingConfig(
            name=c.name,
            embedding_dim=c.embedding_dim,
            num_embeddings=c.num_embeddings,
            feature_names=c.feature_names,
        )
        for c in configs
    ]
    tables = EmbeddingCollection(tables=theirs, device=torch.device("meta"))
    rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
    sharder = EmbeddingCollectionSharder(fused_params=rule)
    plan = construct_module_sharding_plan(
        tables,
        {config.name: row_wise(compute_kernel="fused") for config in configs},
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        make_model(tables),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )


def held_rows(model):
    """The ShardedTensors of its tables."""
    return {key.split(".")[-2]: value for key, value in model.state_dict().items() if "embeddings" in key}


def fill(model, wanted):
    """Give its tables these whole rows and Adagrad sums."""
    sums = {
        key.rpartition(".")[0]: value
        for parts in model.fused_optimizer.state_dict()["state"].values()
        for key, value in parts.items()
    }
    for name, value in held_rows(model).items():
        for sharded_tensor, part in ((value, "weight"), (sums[name], "momentum1")):
            shard = sharded_tensor.local_shards()[0]
            first = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(wanted[name][part][first : first + len(shard.tensor)])


def local_tables(model):
    """Rows and Adagrad sums of this rank, by table."""
    rows = {name: value.local_shards()[0].tensor.clone() for name, value in held_rows(model).items()}
    state = model.fused_optimizer.state_dict()["state"]
    sums = {
        key.rpartition(".")[0]: value.local_shards()[0].tensor.clone()
        for parts in state.values()
        for key, value in parts.items()
    }
    return rows, sums
