"""Every way rows can travel, one file each, and the registry that opens them."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.transports.registry import (
        TransportKind,
        describe_transport,
        find_transport_kind,
        is_foreign,
        kind_for_cpu,
        kind_for_ids,
        make_transport,
        survey,
    )
    from freescale.comm.transports.traced import TracedTransport
else:
    __getattr__, __dir__ = open_door(__name__)
