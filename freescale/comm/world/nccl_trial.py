"""A try: do two ranks that share a GPU reach each other over the NCCL that is loaded?

Versions say what should work. This says what does: two processes under MPS add up a number and exchange uneven rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from freescale.comm.world.joining import backend_for, join_ranks
from freescale.comm.world.launcher import as_rank, launch
from freescale.comm.world.shared_gpu import PROMISED, SHARED, loaded_nccl, no_shared_nccl, virtual_gpus
from freescale.errors import FreeScaleError, TrainingError


def try_shared_nccl() -> tuple[bool, str]:
    """Whether what should work does, and one line about it; a version that cannot is no failure."""
    problem = no_shared_nccl()
    if problem is not None:
        return True, f"no: {problem}; LD_PRELOAD of a newer libnccl.so.2 is enough to try one"
    version = ".".join(map(str, loaded_nccl() or ()))
    try:
        with virtual_gpus(2) as shared:
            if not shared.partitioned:
                return (
                    True,
                    f"no: NCCL {version} would, but only under CUDA MPS, which cannot be started here",
                )
            launch([], num_ranks=2, environment=shared.environment, program=("-m", __name__))
    except FreeScaleError as error:
        return False, f"NCCL {version} should, but does not: {error.what}"
    told = f"yes: two ranks of one GPU added up and exchanged rows over NCCL {version}"
    more = no_shared_nccl(PROMISED + 1)
    return True, told if more is None else f"{told}; more than two may hang ({SHARED}=1 tries)"


def _rank() -> None:
    with join_ranks(device="cuda", timeout_s=60.0) as ranks:
        if "nccl" not in backend_for(ranks.device):
            raise TrainingError("these ranks were given no NCCL")
        counts = torch.tensor([[3, 0], [70_000, 1]])
        send, receive = counts[ranks.rank].tolist(), counts[:, ranks.rank].tolist()
        rows = torch.full((sum(send),), ranks.rank, device=ranks.device)
        received = rows.new_empty(sum(receive))
        dist.all_to_all_single(received, rows, receive, send)
        wanted = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor(receive))
        if not torch.equal(received.cpu(), wanted):
            raise TrainingError("rows arrived other than they were sent")


if __name__ == "__main__":
    as_rank(_rank)
