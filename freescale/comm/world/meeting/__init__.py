"""How ranks find each other: what launchers say, the network between machines, the store they meet at."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.world.meeting.environment import launched_by, own_membership, publish_membership
    from freescale.comm.world.meeting.launchers import Membership
    from freescale.comm.world.meeting.network import choose_interface, free_port
    from freescale.comm.world.meeting.nodes import Nodes, check_start, nodes_asked_for
    from freescale.comm.world.meeting.open_files import allow_open_files
    from freescale.comm.world.meeting.private_sockets import PrivateListener, call
    from freescale.comm.world.meeting.rendezvous import Meeting, send_word, store_of_launcher
else:
    __getattr__, __dir__ = open_door(__name__)
