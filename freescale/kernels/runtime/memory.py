"""How much memory of a GPU is left."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """What torch could hand out: of the GPU, or of this process' share of it."""
    # Not every call takes a device without a number.
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(index)
    share = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return max(0, min(free, share - reserved)) + reserved - torch.cuda.memory_allocated(index)
