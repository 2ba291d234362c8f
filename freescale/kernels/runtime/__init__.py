"""What every kernel stands on: Triton, launches, recorded graphs, GEMMs, transfers between host and device."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.runtime.copy_blocks import copy_with_blocks
    from freescale.kernels.runtime.cuda_streams import current_stream, stream_address
    from freescale.kernels.runtime.frame_loops import join_blocks, pack_frames, read_frames, size_frames
    from freescale.kernels.runtime.gemm import add_product_to, gemm_warmup, product, weight_gradient
    from freescale.kernels.runtime.graph_fills import finish_graph
    from freescale.kernels.runtime.launch import CachedLauncher, kernels_of, start_kernel
    from freescale.kernels.runtime.memory import free_bytes
    from freescale.kernels.runtime.part_sums import sum_parts
    from freescale.kernels.runtime.postponed import (
        Later,
        PostponedGradients,
        later,
        linear,
        multiplied,
        of_weight,
        of_weights,
    )
    from freescale.kernels.runtime.precision import product_precision
    from freescale.kernels.runtime.readback import Readback
    from freescale.kernels.runtime.shared_flags import add_one_to_flag, load_flag, store_flag
    from freescale.kernels.runtime.threads import same_device, start_thread
    from freescale.kernels.runtime.transfers import (
        Alone,
        Carrier,
        HostRoom,
        Parcel,
        Sealed,
        on_device,
        to_device,
        to_host,
    )
    from freescale.kernels.runtime.triton_support import can_fuse, has_triton
else:
    __getattr__, __dir__ = open_door(__name__)
