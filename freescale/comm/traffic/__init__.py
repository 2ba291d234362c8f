"""What travels in which order: priorities, routing by owner, deterministic all-reduce, expert exchange."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.traffic.bundle import Bundle
    from freescale.comm.traffic.channels import (
        open_channel,
        open_channels,
        open_cpu_channel,
        open_ids_channel,
        open_node_stages,
    )
    from freescale.comm.traffic.deterministic_all_reduce import start_all_reduce
    from freescale.comm.traffic.expert_exchange import ExpertExchange
    from freescale.comm.traffic.node_stages import (
        Carry,
        NodeGroups,
        NodeStages,
        Relay,
        TravelOrder,
        carry_to_askers,
        carry_to_owners,
        open_node_groups,
        send_keys_by_node,
        why_no_node_stages,
    )
    from freescale.comm.traffic.priority import Channels, Deadline, Gate, TrafficQueue
    from freescale.comm.traffic.routing import (
        OwnedKeys,
        Route,
        ask_owners,
        routes_by_edges,
        send_keys,
    )
else:
    __getattr__, __dir__ = open_door(__name__)
