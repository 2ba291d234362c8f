"""The parts of an HSTU step beside attention: input, layer, sampled softmax."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.hstu.input import input_states
    from freescale.kernels.hstu.layer import can_fuse_layer, fused_layer
    from freescale.kernels.hstu.parts import add_product, gate, project_targets, project_uvqk
    from freescale.kernels.hstu.reference import plain_norm, stu_gate, unit
    from freescale.kernels.hstu.softmax import sampled_softmax
    from freescale.kernels.hstu.stu import (
        can_fuse_stu,
        fused_stu_layer,
        fused_stu_targets,
        stu_project,
    )
    from freescale.kernels.hstu.summed import Sum, Taken, sum_taken
    from freescale.kernels.hstu.weights import LayerWeights, STUWeights, WholeBatch
else:
    __getattr__, __dir__ = open_door(__name__)
