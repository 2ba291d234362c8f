"""Rings of slots in memory that ranks share, and the engines that move them."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.rings.copies_inside import DriverInside
    from freescale.comm.rings.cpu_engine import SharedRings
    from freescale.comm.rings.cuda_driver import CudaDriver, Driver, missing_driver
    from freescale.comm.rings.pinned_flags import PinnedFlags
    from freescale.comm.rings.ring_transport import RingTransport
    from freescale.comm.rings.rounds import EPOCHS, Rings, rings_of_gpus
    from freescale.comm.rings.shared_memory import share_memory, together
    from freescale.comm.rings.stream_engine import StreamEngine, index_of
else:
    __getattr__, __dir__ = open_door(__name__)
