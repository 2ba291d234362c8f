"""Expert MLPs: routing, and three ways to compute them."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.moe.api import ACTIVATIONS, Backend, expert_mlp
    from freescale.kernels.moe.reference import activated
    from freescale.kernels.moe.steps import Activation, Save
else:
    __getattr__, __dir__ = open_door(__name__)
