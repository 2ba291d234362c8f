"""Several ranks on one GPU, each with its share of the SMs and of the memory: virtual GPUs.

Under CUDA MPS the kernels of all ranks run at the same time, so real multi-rank training, its overlap and its waits
can be run and measured on one GPU. Without MPS the ranks take turns on the whole GPU: what they compute is the same,
how long it takes says nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from freescale.comm.world.shared_gpu.mps import MpsError, ended_by_signals, mps_daemon
from freescale.comm.world.shared_gpu.nccl import sharing_variables
from freescale.errors import TrainingError

NUM_VIRTUAL_GPUS = "FREESCALE_VIRTUAL_GPUS"
_MAX_CLIENTS = 48
"""Processes one MPS server takes, on Volta and later."""

_QUEUES = 96
"""Hardware queues asked for by all ranks together: an even share each, 8 to 32."""

_MULTIPROCESSOR_COUNT = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""


@dataclass(frozen=True)
class Gpu:
    """What the launcher knows of the GPU that is to be shared."""

    name: str
    num_sms: int
    memory_gib: float


@dataclass(frozen=True)
class Shared:
    """A GPU shared by ranks: what to put into their environment, and what to tell the user."""

    environment: Mapping[str, str]
    partitioned: bool
    message: str


@contextmanager
def virtual_gpus(num_ranks: int, *, gpu: Gpu | None = None) -> Iterator[Shared]:
    """Share the first visible GPU among ranks started inside; the MPS daemon ends when the block does.

    Args:
        num_ranks: ranks, each with 1 / num_ranks of the SMs and of the memory.
        gpu: facts of the GPU; asked from the driver unless given.
    """
    gpu = gpu or find_gpu()
    if not 1 <= num_ranks <= min(_MAX_CLIENTS, gpu.num_sms // 2):
        raise TrainingError(
            "this GPU cannot be shared by that many ranks",
            got=f"--virtual-gpus {num_ranks}, {gpu.name} with {gpu.num_sms} SMs",
            allowed=f"1 to {min(_MAX_CLIENTS, gpu.num_sms // 2)}",
        )
    first = first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        try:
            clients = stack.enter_context(mps_daemon(visible=first))
            shared = _side_by_side(num_ranks, gpu, first, clients)
        except MpsError as error:
            shared = _taking_turns(num_ranks, gpu, first, why=str(error))
        yield shared


def can_share() -> str:
    """What `--virtual-gpus` would do on this machine, in one line; an MPS daemon is started and ended to see."""
    try:
        gpu = find_gpu()
        with mps_daemon(visible=first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))):
            shares = ", ".join(f"{n} x {sm_percentage(gpu.num_sms, n)[1]} SMs" for n in (2, 4, 8))
            return f"side by side under CUDA MPS: {shares} of {gpu.name}"
    except MpsError as error:
        return f"time-sliced only, timings say nothing: {error}"
    except TrainingError as error:
        return f"no: {error.got or error.what}"


def check_request(num_ranks: int, *, nproc: int, device: str, nnodes: int = 1) -> None:
    """Refuse what contradicts --virtual-gpus before anything is started."""
    if "RANK" in os.environ:
        raise TrainingError(
            "--virtual-gpus starts its own ranks, but this process is a rank already",
            got=f"--virtual-gpus {num_ranks} under torchrun or another launcher",
            next_step="start freescale --virtual-gpus N by itself",
        )
    if nnodes > 1:
        raise TrainingError(
            "--virtual-gpus shares one GPU of this machine, but --nnodes asks for several machines",
            got=f"--virtual-gpus {num_ranks} --nnodes {nnodes}",
            next_step="leave one of them away",
        )
    if nproc not in (1, num_ranks):
        raise TrainingError(
            "--nproc and --virtual-gpus ask for different numbers of ranks",
            got=f"--nproc {nproc} --virtual-gpus {num_ranks}",
            next_step="give --virtual-gpus alone: it is the number of ranks",
        )
    if device == "cpu":
        raise TrainingError(
            "--virtual-gpus shares a GPU, but run.device=cpu",
            next_step=f"--nproc {num_ranks} runs that many ranks on the CPU",
        )


def virtual_gpus_here() -> int:
    """How many ranks share this rank's GPU; 0 when it has one of its own."""
    return int(os.environ.get(NUM_VIRTUAL_GPUS, "0"))


def memory_fraction(num_ranks: int) -> float:
    """A rank's share of the memory; what is left is for the contexts and kernels of all of them."""
    return 0.95 / num_ranks


def sm_percentage(num_sms: int, num_ranks: int) -> tuple[int, int]:
    """(percent, SMs) a rank gets: the most such that all ranks fit side by side.

    MPS takes whole percent and rounds down to pairs of SMs (25 % of 132 SMs are 32). Plain 100 // 8 = 12 % would give
    each of 8 ranks 14 SMs and leave 20 idle; 13 % gives 16.
    """
    fits = [(_sms(num_sms, p), p) for p in range(1, 101) if num_ranks * _sms(num_sms, p) <= num_sms]
    most = max(sms for sms, _ in fits)
    return min(p for sms, p in fits if sms == most), most


def first_visible(visible: str | None) -> str:
    """The GPU that is shared, as CUDA_VISIBLE_DEVICES names it: the first that this process may use."""
    return (visible or "0").split(",")[0].strip() or "0"


def find_gpu() -> Gpu:
    """The first visible GPU. Asked from the driver without a context: one beside MPS would take turns with it."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        found, device, sms, memory = (ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t())
        name = ctypes.create_string_buffer(128)
        _check(cuda.cuInit(0))
        _check(cuda.cuDeviceGetCount(ctypes.byref(found)))
        _check(cuda.cuDeviceGet(ctypes.byref(device), 0))
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(sms), _MULTIPROCESSOR_COUNT, device))
        _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
        _check(cuda.cuDeviceGetName(name, len(name), device))
    except OSError as error:
        raise TrainingError(
            "--virtual-gpus needs an NVIDIA GPU, and this machine shows none",
            got=str(error),
            next_step="freescale train --nproc N run.device=cpu runs ranks on the CPU; `freescale doctor` shows more",
        ) from None
    return Gpu(name.value.decode(), sms.value, memory.value / 2**30)


def _check(result: int) -> None:
    if result:
        raise OSError(f"the CUDA driver reports error {result}")


def _sms(num_sms: int, percent: int) -> int:
    return max(2, num_sms * percent // 100 // 2 * 2)


def _common(num_ranks: int) -> dict[str, str]:
    return {
        NUM_VIRTUAL_GPUS: str(num_ranks),
        # Symmetric memory refuses two ranks on one device unless told that it is meant.
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        # A stream that waits for a flag holds up all streams of its hardware queue, and two ranks may then wait for
        # each other. Clients of MPS share one pool of queues and get few unless they ask.
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get(
            "CUDA_DEVICE_MAX_CONNECTIONS", str(max(8, min(32, _QUEUES // num_ranks)))
        ),
    }


def _side_by_side(num_ranks: int, gpu: Gpu, first: str, clients: Mapping[str, str]) -> Shared:
    percent, sms = sm_percentage(gpu.num_sms, num_ranks)
    environment = {
        **_common(num_ranks),
        **clients,
        **{name: os.environ.get(name, value) for name, value in sharing_variables(sms).items()},
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
        # The daemon sees one GPU and numbers it anew; only a UUID means the same to both.
        "CUDA_VISIBLE_DEVICES": first if first.startswith(("GPU-", "MIG-")) else "0",
    }
    memory = gpu.memory_gib * memory_fraction(num_ranks)
    return Shared(
        environment,
        True,
        f"{num_ranks} virtual GPUs on {gpu.name}: {sms} of {gpu.num_sms} SMs ({percent} %) "
        f"and {memory:.0f} GiB each, side by side under CUDA MPS",
    )


def _taking_turns(num_ranks: int, gpu: Gpu, first: str, *, why: str) -> Shared:
    return Shared(
        {**_common(num_ranks), "CUDA_VISIBLE_DEVICES": first},
        False,
        f"{num_ranks} virtual GPUs on {gpu.name} without CUDA MPS ({why}): the ranks take turns on the whole GPU. "
        "Results are the same; timings are time-sliced and say nothing about real GPUs",
    )
