"""Joining a run: find the other processes, open the groups, and part, or cut them off on the way out of a failure."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from freescale.comm import open_privately
from freescale.comm.world.facts import gather_facts
from freescale.comm.world.launcher import CPU_THREADS, QUEUES, RENDEZVOUS
from freescale.comm.world.meeting import (
    Meeting,
    Membership,
    allow_open_files,
    choose_interface,
    own_membership,
    publish_membership,
    store_of_launcher,
)
from freescale.comm.world.ranks import Ranks, pick_device, refuse_shared_gpu
from freescale.comm.world.shared_gpu import (
    is_mps_client,
    loaded_nccl,
    memory_fraction,
    no_shared_nccl,
    virtual_gpus_here,
)
from freescale.comm.world.time_limit import within
from freescale.comm.world.watch import Watch, open_watch, say, show_stacks_of_errors
from freescale.errors import Preempted, TrainingError

_ABORT_S = 2.0
_CLOSE_S = 20.0
_TRY_S = 30.0


@contextmanager
def join_ranks(*, device: str = "auto", timeout_s: float = 600.0, silent_s: float = 25.0) -> Iterator[Ranks]:
    """Take part in the run this process was started for; alone when the environment names no others.

    Args:
        device: auto, cpu or cuda.
        timeout_s: how long to wait for a rank that is late.
        silent_s: how long to wait for a rank that gives no sign of life.
    """
    show_stacks_of_errors()
    who = own_membership()
    publish_membership(who)
    if who.num_ranks > 1:
        for name, value in QUEUES.items():  # before the first call of CUDA
            os.environ.setdefault(name, value)
    chosen = pick_device(device, local_rank=who.rank if who.local_rank is None else who.local_rank)
    _prepare_device(chosen)
    if who.alone or (who.num_ranks == 1 and who.master is None and RENDEZVOUS not in os.environ):
        yield Ranks(rank=0, num_ranks=1, device=chosen)
        return
    if (line := choose_interface(who)) and not who.local_rank:  # said once a machine
        say(line)
    allow_open_files(who.num_ranks)
    watch = _join(chosen, who, timeout_s=timeout_s, silent_s=silent_s)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        with watch.telling_failures():
            control, background = (
                open_privately(lambda: dist.new_group(backend="gloo", timeout=timeout)) for _ in range(2)
            )
            if not virtual_gpus_here():
                refuse_shared_gpu(gather_facts(control, chosen).ranks)
            yield Ranks(
                rank=who.rank,
                num_ranks=who.num_ranks,
                device=chosen,
                group=dist.group.WORLD,
                control=control,
                background=background,
                timeout_s=timeout_s,
                watch=watch,
            )
            dist.barrier(group=control)  # nobody takes connections down that another still needs
    except Preempted:
        _part(watch)
        raise
    except BaseException:
        _abort()
        raise
    _part(watch)


def one_rank(*, device: str = "auto") -> Ranks:
    """This process by itself, whatever run it was started for; to look at a run, not to take part."""
    chosen = pick_device(device)
    _prepare_device(chosen)
    return Ranks(rank=0, num_ranks=1, device=chosen)


def _prepare_device(device: torch.device) -> None:
    """What this process sets for its device before it uses it."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    if CPU_THREADS in os.environ:
        # The host has small things to do beside the GPU. Threads that share one are done when the last of them is,
        # and beside the threads of other ranks one is always late. (torchrun gives a rank one, too.)
        torch.set_num_threads(1)
    if sharing := virtual_gpus_here():
        torch.cuda.set_per_process_memory_fraction(memory_fraction(sharing), device)


def _join(device: torch.device, who: Membership, *, timeout_s: float, silent_s: float) -> Watch:
    """Find the other processes, watch them, and open the first process group."""
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = backend_for(device)
    if who.rank == 0 and (line := _kept_from_nccl(device)):
        say(line)
    place: dict[str, Any]
    if file := os.environ.get(RENDEZVOUS):  # our launcher has started all of them on this machine
        watch = open_watch(who.rank, who.num_ranks, silent_s=silent_s)
        place = {"init_method": file}
    else:
        serves = who.rank == 0 and not store_of_launcher()
        assert who.master is not None, "own_membership has checked it"
        assert who.port is not None
        meeting = Meeting(who.rank, who.num_ranks, who.master, who.port, serves=serves, timeout_s=timeout_s)
        if who.rank == 0:
            meeting.refuse_newcomers()
        watch = open_watch(who.rank, who.num_ranks, silent_s=silent_s, store=meeting.store)
        place = {"store": meeting.store}
    with watch.telling_failures():
        open_privately(
            lambda: dist.init_process_group(
                backend, rank=who.rank, world_size=who.num_ranks, timeout=timeout, **place
            )
        )
        if virtual_gpus_here() and "nccl" in backend:
            _try_nccl(device)
    return watch


def backend_for(device: torch.device) -> str:
    """What serves tensors of a rank: gloo those of a CPU, NCCL those of a GPU.

    Two ranks that share a GPU have NCCL from 2.30 on, side by side under MPS: taking turns, each would wait for the
    other until its own turn is over. More have it when asked for, as they may hang. What gloo cannot move from there,
    goes by way of the CPU or a transport.
    """
    if device.type != "cuda":
        return "gloo"
    sharing = virtual_gpus_here()
    if sharing and (not is_mps_client() or no_shared_nccl(sharing) is not None):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def _kept_from_nccl(device: torch.device) -> str | None:
    """What to say to ranks that share a GPU and could have NCCL, were they fewer."""
    sharing = virtual_gpus_here()
    if device.type != "cuda" or not sharing or not is_mps_client() or no_shared_nccl() is not None:
        return None
    problem = no_shared_nccl(sharing)
    return None if problem is None else f"gloo between these ranks: {problem}"


def _try_nccl(device: torch.device) -> None:
    """See whether NCCL really works between ranks that share a GPU, before anything waits for it without an end."""
    found: list[int] = []

    def add_up() -> None:
        mark = torch.ones(1, device=device)
        work = dist.all_reduce(
            mark, async_op=True
        )  # opens the communicator, and may wait in this call for ever
        assert work is not None
        while not work.is_completed():
            time.sleep(0.005)
        found.append(int(mark))

    sharing = virtual_gpus_here()
    ended = within(_TRY_S, add_up, name="try NCCL")
    if not ended or found != [sharing]:
        raise TrainingError(
            f"NCCL does not come to an end between {sharing} ranks that share one GPU",
            got=f"NCCL {'.'.join(map(str, loaded_nccl() or ()))}, one number of each rank, "
            + (f"{_TRY_S:.0f} s" if not ended else f"the sum was {found[0]}"),
            next_step="FREESCALE_SHARED_NCCL=0 goes on without NCCL; so may fewer ranks or a smaller NCCL_MAX_CTAS",
        )


def _part(watch: Watch) -> None:
    """All went well: say good-bye, then close the connections."""
    watch.leave()
    # Communicators of NCCL are closed by all ranks together: where one does not come to it, the others would stay here.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def close() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own
        dist.destroy_process_group()

    if not within(_CLOSE_S, close, name="close groups"):
        say(
            f"the process groups of this run were not closed within {_CLOSE_S:.0f} s; its results are complete, but "
            "this process cannot take part in another run"
        )


def _abort() -> None:
    """On the way out of a failure: communicators are cut off, never closed, which may wait for those that are gone."""

    def cut() -> None:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    within(_ABORT_S, cut, name="abort")
