"""Several ranks on one GPU: its shares, MPS between them, and what NCCL makes of that."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.world.shared_gpu.mps import is_mps_client
    from freescale.comm.world.shared_gpu.nccl import PROMISED, SHARED, loaded_nccl, no_shared_nccl
    from freescale.comm.world.shared_gpu.shares import (
        can_share,
        check_request,
        memory_fraction,
        virtual_gpus,
        virtual_gpus_here,
    )
else:
    __getattr__, __dir__ = open_door(__name__)
