"""How ranks find each other and exchange rows. Here: the protocol; inside: world, rings, transports, traffic."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.gloo_sockets import open_privately
    from freescale.comm.transport import (
        AloneTransport,
        Pending,
        Transport,
        UnsizedTransport,
        agree_on_counts,
        backend_of,
        exchange_counts,
        only_queues,
        own_group,
        sends_unsized,
        supports_device,
    )
else:
    __getattr__, __dir__ = open_door(__name__)
