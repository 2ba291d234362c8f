"""Tensors that lie over the ranks, brought together."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from freescale.comm import supports_device


def whole_tensor(values: Tensor) -> Tensor:
    """All parts of a DTensor, on every rank, where its part was; every rank must call it. Others are whole as they are.

    By way of the CPU where the group cannot read the device: `full_tensor` would end all ranks with signal 11 there,
    since gloo reads the memory of a GPU as if it were the host's (pytorch issue 152645).
    """
    if not isinstance(values, DTensor):
        return values
    group = values.device_mesh.get_group()
    local = values.to_local()
    if supports_device(group, local.device):
        return values.full_tensor()
    on_cpu = DTensor.from_local(
        local.cpu(),
        DeviceMesh.from_group(group, "cpu"),
        values.placements,
        run_check=False,
        shape=values.shape,
        stride=values.stride(),
    )
    return on_cpu.full_tensor().to(local.device)
