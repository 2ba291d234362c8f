"""How much memory of a GPU is left."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """What torch could hand out: of the GPU, or of this process' share of it."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free, share - reserved)) + reserved - torch.cuda.memory_allocated(device)
