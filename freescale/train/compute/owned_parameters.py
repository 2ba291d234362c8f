"""Parameters that one rank alone holds, as experts spread over the ranks.

Their gradients are complete where they live, so they take no part in the sum over ranks. What speaks of the model as a
whole must still see all of them: the norm that gradients are clipped by, and checkpoints, which keep them as global
tensors, so that any number of ranks can load what any number saved.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.comm.world import Ranks


class OwnedParameters:
    """The parameters of a model that this rank holds a part of.

    Args:
        model: the dense part.
        ranks: who holds the others.
        lengths: by the name of a parameter that is cut over the ranks, its length over all of them.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, lengths: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._lengths = dict(lengths)
        self._parameters = [param for name, param in model.named_parameters() if name in self._lengths]
        self._others = [param for name, param in model.named_parameters() if name not in self._lengths]
        self._mesh: DeviceMesh | None = None

    @property
    def names(self) -> set[str]:
        """Names of the parameters; empty where every rank holds everything."""
        return set(self._lengths)

    def whole(self, name: str, values: Tensor) -> Tensor:
        """This rank's part of a parameter, or of its optimizer state, as a part of one global tensor."""
        if name not in self._lengths or values.dim() == 0:
            return values
        if self._mesh is None:
            assert self._ranks.group is not None
            self._mesh = DeviceMesh.from_group(self._ranks.group, self._ranks.device.type)
        shape = torch.Size((self._lengths[name], *values.shape[1:]))
        strides = (shape[1:].numel(), *values.stride()[1:])
        return DTensor.from_local(
            values.detach(), self._mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
        )

    def num_values(self, name: str, values: Tensor) -> int:
        """How many numbers a parameter has over all ranks."""
        whole = self._lengths.get(name, len(values) if values.dim() else 1)
        return whole * values.shape[1:].numel()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm over the whole model is at most this; returns the norm before."""
        if not self._parameters:
            return nn.utils.clip_grad_norm_(self._others, max_norm)
        if self._ranks.device.type == "cuda" and self._ranks.sums_on_device:
            return self._clip_on_device(max_norm)
        shared = _gradients(self._others)
        square = float(nn.utils.get_total_norm(shared)) ** 2 if shared else 0.0
        # One place a rank: every rank adds the same numbers in the same order and scales by the same bits.
        squares = torch.zeros(self._ranks.num_ranks, dtype=torch.float64)
        own = _gradients(self._parameters)
        if own:
            squares[self._ranks.rank] = float(nn.utils.get_total_norm(own)) ** 2
        self._ranks.sum_on_cpu(squares, what="sum the gradient norm")
        norm = (square + sum(squares.tolist())) ** 0.5
        known = torch.tensor(norm, dtype=torch.float64, device=self._ranks.device)
        nn.utils.clip_grads_with_norm_([*self._others, *self._parameters], max_norm, known)
        return known

    def _clip_on_device(self, max_norm: float) -> Tensor:
        """The same where nobody but the device need know the norm: the host does not wait for it."""
        device = self._ranks.device
        squares = torch.zeros(self._ranks.num_ranks, dtype=torch.float64, device=device)
        if own := _gradients(self._parameters):
            squares[self._ranks.rank].copy_(nn.utils.get_total_norm(own).double() ** 2)
        self._ranks.sum(squares)
        total = squares.sum()
        if shared := _gradients(self._others):
            total = total + nn.utils.get_total_norm(shared).double() ** 2
        norm = total.sqrt()
        nn.utils.clip_grads_with_norm_([*self._others, *self._parameters], max_norm, norm)
        return norm


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in parameters if param.grad is not None]
