"""Rows once a node between ranks on a GPU that are told to be two nodes: the bits of the plain path, on streams."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from freescale.comm.traffic import open_node_groups, open_node_stages
from freescale.comm.transports.registry import make_transport
from freescale.embedding import Adam
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from tests.gpu.test_prioritized_on_gpu import DIM, NUM_ROWS, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PORT = 29573


def on_two_nodes(rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    group = dist.group.WORLD
    assert group is not None
    how = {"device": "cuda:0", "kind": "collective"}
    stages = open_node_stages(open_node_groups(group), **how)
    spec = TableSpec(name="item", num_rows=NUM_ROWS, dim=DIM, optimizer=Adam(), init_std=1.0)

    def table(*, by_node: bool) -> ShardedEmbedding:
        transport = make_transport(group, **how)
        return ShardedEmbedding(
            [spec], group=group, device="cuda:0", transport=transport, stages=stages if by_node else None
        )

    plain = train(table(by_node=True), rank, prioritized=False)
    for beside in (False, True):
        ours = train(table(by_node=True), rank, prioritized=True, beside=beside)
        for name, values in plain.items():
            assert torch.equal(ours[name], values), (name, beside)
    once_a_rank = train(table(by_node=False), rank, prioritized=False)
    torch.testing.assert_close(plain["weight"], once_a_rank["weight"], rtol=1e-3, atol=1e-3)
    dist.destroy_process_group()


def test_four_ranks_as_two_nodes_have_the_bits_of_the_plain_path() -> None:
    multiprocessing.spawn(on_two_nodes, nprocs=4)
