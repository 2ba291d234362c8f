"""Where the sequences of coming batches stand, worked out before they are computed.

A layout, and the lists of tiles that kernels read from it, follow from lengths alone. Made in the training thread they
take it longer than starting all kernels of a small model: 4.5 of 8 ms of forward and backward on the machine of the
H200 results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.data import SequenceBatch
from freescale.kernels import LayoutWishes, SequenceLayout
from freescale.kernels.runtime import Parcel
from freescale.pipeline.streams import record_stream


@dataclass(frozen=True, eq=False)
class PreparedLayouts:
    """Layouts of one batch, and the memory their lists came in.

    Args:
        parts: one for each micro-batch.
        memory: on the device.
    """

    parts: tuple[SequenceLayout, ...] = ()
    memory: tuple[Tensor, ...] = ()

    def record_stream(self) -> None:
        """This stream uses what another one has copied to the device."""
        for tensor in self.memory:
            record_stream(tensor)


class LayoutPlanner:
    """Makes the layouts of batches, with all that those of the batches before were asked for.

    Args:
        device: where the model computes.
        parts: micro-batches a step.
    """

    def __init__(self, device: torch.device, *, parts: int = 1) -> None:
        self._device, self._parts = device, parts
        self._wishes = LayoutWishes()

    def plan(self, batch: SequenceBatch) -> PreparedLayouts:
        """The layouts of a batch; their lists are on the way to the device."""
        lengths = SequenceBatch(offsets=batch.offsets)
        layouts = tuple(
            SequenceLayout(part.offsets, device=self._device, wishes=self._wishes)
            for part in (lengths.split(self._parts) if self._parts > 1 else [lengths])
        )
        if self._device.type != "cuda":
            return PreparedLayouts(layouts)
        parcel = Parcel(self._device, room=self._wishes.parcel_bytes)
        for layout in layouts:
            layout.prepare(parcel)
        parcel.send()
        self._wishes.took(parcel.wanted)
        return PreparedLayouts(layouts, parcel.tensors())
