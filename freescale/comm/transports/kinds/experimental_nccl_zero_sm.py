"""experimental_nccl_zero_sm: NCCL's own transfers without SMs, where the installed versions have them.

Experimental: it has delivered every row between two ranks of one GPU, and what it stands on, puts called as functions
of NCCL, starts no kernel of NCCL's (`benchmarks/nccl_zero_sm.py`; inside one GPU the driver's copies are kernels). It
has not run between GPUs. So it is used when a recipe names it; `auto` never takes it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from freescale.comm import Transport, own_group
from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.transports.nccl_library import LibraryWindow, OwnCommunicator, missing_functions
from freescale.comm.transports.nccl_one_sided import OneSidedTransport
from freescale.comm.transports.nccl_padded import PaddedTransport
from freescale.comm.transports.nccl_routes import NcclFacts, NcclRoute, choose_route, parse_version
from freescale.comm.world import GroupFacts, loaded_nccl, no_shared_nccl
from freescale.errors import TrainingError
from freescale.registry import register


def route_of(facts: GroupFacts) -> NcclRoute:
    """What the versions of this process allow for a group."""
    version = parse_version(torch.__version__)
    torch_version = (version[0], version[1])
    asked = os.environ.get("TORCH_DIST_USE_NCCL2", "1" if torch_version >= (2, 15) else "0")
    return choose_route(
        NcclFacts(
            torch=torch_version,
            nccl=nccl_version(),
            num_nodes=len({each.machine for each in facts.ranks}),
            num_ranks=len(facts.ranks),
            nccl2=asked == "1",
            missing=missing_functions(),
            zero_cta=os.environ.get("NCCL_CTA_POLICY", "2").strip().upper() in ("2", "ZERO"),
        )
    )


def nccl_version() -> tuple[int, int, int]:
    """Of the library torch calls; zeros without one."""
    return (dist.is_nccl_available() and loaded_nccl()) or (0, 0, 0)


_COPIED = "rows are copied into and out of its memory by kernels"


@register("transport", "experimental_nccl_zero_sm")
class NcclZeroSmRoute:
    """GPU ranks, each with its own GPU, where NCCL can move rows without SMs."""

    keeps_group = False

    @staticmethod
    def why_not(facts: GroupFacts) -> str | None:
        """What keeps a group from using it."""
        if not facts.on_gpu or not facts.backend.startswith("nccl"):
            return f"these tensors are exchanged by {facts.backend}, not by NCCL"
        if facts.shared_gpu and (problem := no_shared_nccl()) is not None:
            return problem
        route = route_of(facts)
        return None if route.sm_free else route.reason

    @staticmethod
    def build(group: dist.ProcessGroup, facts: GroupFacts, timeout_s: float) -> Transport:
        """Open it for a group; every rank must call it."""
        route = route_of(facts)
        control = own_group(group, backend="gloo", timeout_s=timeout_s)
        members = own_group(group, backend="nccl", timeout_s=timeout_s)
        if route.name == "padded":
            return _build_padded(members, control, facts.device, route.reason, timeout_s=timeout_s)
        opened: dict[str, Any] = {
            "window": lambda size, places: C10dWindow(members, size, facts.device),
            "put_signal": lambda size, places: SymmetricWindow(members, size, places, facts.device),
        }
        if route.name == "library":
            communicator = OwnCommunicator(facts.rank, len(facts.ranks), share=partial(_share, group=control))
            opened["library"] = lambda size, places: LibraryWindow(communicator, size)
        engine = "NCCL one-sided puts: copy engines in a machine, RDMA by its proxy thread between machines"
        reason = f"{route.reason}; NCCL starts no kernel, but {_COPIED}"
        return OneSidedTransport(opened[route.name], control=control, engine=engine, reason=reason)


def _share(name: bytes, group: dist.ProcessGroup) -> bytes:
    """Bytes of the group's first rank, on all of them."""
    sent = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    dist.broadcast(sent, group=group, group_src=0)
    return sent.numpy().tobytes()


def _build_padded(
    members: dist.ProcessGroup,
    control: dist.ProcessGroup,
    device: torch.device,
    reason: str,
    *,
    timeout_s: float,
) -> Transport:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options.config.cta_policy = kind.NCCL_CTA_POLICY_ZERO
    options._timeout = datetime.timedelta(seconds=timeout_s)
    quiet: Any = dist.new_group(
        dist.get_process_group_ranks(members),
        backend="nccl",
        timeout=options._timeout,
        pg_options=options,
        device_id=device,
    )
    side = torch.cuda.Stream(device)

    def exchange(received: Tensor, sent: Tensor) -> Any:
        # Not on the legacy stream: there NCCL goes back to kernels.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            return dist.all_to_all_single(received, sent, group=quiet, async_op=True)

    return PaddedTransport(
        exchange=exchange,
        buffers=RegisteredBuffers(quiet, device),
        uneven=CollectiveTransport(members, device=device),
        control=control,
        reason=f"{reason}; NCCL starts no kernel for nearly equal messages, but {_COPIED}",
    )


class RegisteredBuffers:
    """Memory of NCCL's allocator, each buffer a window of its own: several in one have been mixed up before 2.31.2.

    Args:
        group: whose communicator they are registered with.
        device: where they are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._backend: Any = group._get_backend(device)
        self._device = device
        self._pools: list[Any] = []

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocated and registered together with the other ranks."""
        pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._backend.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return buffer


class C10dWindow:
    """A window of torch's nccl2 backend (torch >= 2.14)."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        backend: Any = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._window = backend.new_window(self.memory)

    def put(self, first_byte: int, num_bytes: int, *, target: int, target_byte: int) -> None:
        """Copy bytes of this window into another rank's, and signal it."""
        self._window.put(self.memory[first_byte : first_byte + num_bytes], target, target_byte, False)

    def wait_signal(self, source: int) -> None:
        """Let the current stream wait for one signal of a rank, and take it."""
        self._window.wait_signal(source, False)


class SymmetricWindow:
    """Symmetric memory of torch's NCCL backend (torch >= 2.12); a put goes to the place its handle was made for.

    Args:
        group: the ranks.
        num_bytes: of each window.
        places: where rows may be put to.
        device: where it is.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_bytes: int, places: Sequence[int], device: torch.device
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._calls: Any = symmetric
        symmetric.set_backend("NCCL")
        self.memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._whole = cast(Any, symmetric.rendezvous(self.memory, group))
        # A handle is made for where a tensor's storage begins, whatever the view: so each place gets one of its own.
        self._places: dict[int, Any] = {
            place: symmetric.rendezvous(from_dlpack(self.memory[place:]), group) for place in places
        }
        for place, handle in self._places.items():
            if handle.offset - self._whole.offset != place:
                raise TrainingError(
                    "symmetric memory gives no handle for a place inside a window",
                    got=f"offset {handle.offset} for byte {place}, torch {torch.__version__}",
                    next_step="comm.transport=collective",
                )

    def put(self, first_byte: int, num_bytes: int, *, target: int, target_byte: int) -> None:
        """Copy bytes of this window into another rank's, and signal it."""
        source = self.memory[first_byte : first_byte + num_bytes]
        self._calls.put_signal(source, self._places[target_byte], target)

    def wait_signal(self, source: int) -> None:
        """Let the current stream wait for one signal of a rank, and take it."""
        self._calls.wait_signal(self._whole, source)
