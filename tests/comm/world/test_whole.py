"""Tensors brought together from all ranks, also by way of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.comm.world import whole, whole_tensor
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks


def gather(rank: int) -> list[list[float]]:
    """Seven rows on three ranks: 3, 3 and 1; as the group can, and as if it could not read where they are."""
    group = these_ranks().group
    own = torch.arange(14.0).view(7, 2)[3 * rank : 3 * rank + 3]
    mesh = DeviceMesh.from_group(group, "cpu")
    parts = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 2)), stride=(2, 1)
    )
    found = [whole_tensor(parts)]
    reads, whole.supports_device = whole.supports_device, lambda group, device: False
    gathered, DTensor.full_tensor = DTensor.full_tensor, _not_of(parts, DTensor.full_tensor)
    try:
        found.append(whole_tensor(parts))
    finally:
        whole.supports_device, DTensor.full_tensor = reads, gathered
    return [each.flatten().tolist() for each in found]


def _not_of(parts: DTensor, gathered: Callable[[DTensor], torch.Tensor]) -> Callable[[DTensor], torch.Tensor]:
    """It would end a rank whose parts lie where the group cannot read them."""

    def checked(self: DTensor) -> torch.Tensor:
        assert self is not parts
        return gathered(self)

    return checked


def test_whole_tensors_are_the_same_by_both_ways():
    wanted = torch.arange(14.0).tolist()
    for found in run_on_ranks(gather, 3):
        assert found == [wanted, wanted]


def test_what_lies_on_one_rank_is_whole():
    values = torch.arange(3.0)
    assert whole_tensor(values) is values
