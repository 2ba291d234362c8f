"""Who takes part: ranks, their processes, clocks and devices, and how they are started."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.comm.world.agreement import fail_together, from_first, gather, here, wait_for
    from freescale.comm.world.background_poll import poll_in_background
    from freescale.comm.world.clocks import SharedClock
    from freescale.comm.world.facts import (
        GroupFacts,
        gather_facts,
        on_one_machine,
        own_facts,
        sharing_machine,
    )
    from freescale.comm.world.joining import join_ranks, one_rank
    from freescale.comm.world.launcher import as_rank, end_with_launcher, launch
    from freescale.comm.world.meeting import (
        Membership,
        Nodes,
        PrivateListener,
        call,
        check_start,
        free_port,
        launched_by,
        nodes_asked_for,
        own_membership,
        send_word,
    )
    from freescale.comm.world.nccl_trial import try_shared_nccl
    from freescale.comm.world.processes import Processes, RanksEndedError, naming_the_ended, other_processes
    from freescale.comm.world.ranks import Ranks, all_reduce, device_name, pick_device
    from freescale.comm.world.shared_gpu import (
        can_share,
        check_request,
        is_mps_client,
        loaded_nccl,
        no_shared_nccl,
        virtual_gpus,
        virtual_gpus_here,
    )
    from freescale.comm.world.watch import (
        end_process,
        in_words,
        keep_failures_in,
        place_met,
        report_failure,
        thread_met,
        was_reported,
    )
    from freescale.comm.world.whole import whole_tensor
else:
    __getattr__, __dir__ = open_door(__name__)
