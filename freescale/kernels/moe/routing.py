"""Which row of which expert every choice of a token becomes: index tensors only, no token is copied.

Rows stand grouped by expert, and inside an expert in the order of their tokens:

    experts_LK    [[2, 0], [0, 1], [2, 1]]        three tokens, two choices each
    offsets       [0, 2, 4, 6]                    rows of expert e: offsets[e] to offsets[e + 1]
    tokens        [0, 1, 1, 2, 0, 2]              the token of every row
    places        [[4, 0], [1, 2], [5, 3]]        the row of every choice

The order follows from the input alone, so it is the same in every run, and nothing is ever read back by the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.errors import FreeScaleError
from freescale.kernels.runtime import has_triton, start_kernel

# Rows of one tile of the products; a tile never holds rows of two experts.
TILE_ROWS = 128
# Choices that one program of the kernels counts and places.
COUNT_TILE = 128
LARGEST = 2**31 - 1


class Routing(NamedTuple):
    """The index tensors of one batch: R = L * K rows, E experts."""

    tokens: Tensor  # [R] int32
    places: Tensor  # [L, K] int32
    offsets: Tensor  # [E + 1] int32

    @property
    def num_experts(self) -> int:
        """How many experts there are, with rows or without."""
        return len(self.offsets) - 1


def num_tiles(num_rows: int, num_experts: int) -> int:
    """The most tiles that rows can need, however they fall to the experts."""
    return -(-num_rows // TILE_ROWS) + num_experts


def route(experts_LK: Tensor, num_experts: int, *, kernels: bool | None = None) -> Routing:
    """The index tensors for the experts of every token.

    Args:
        experts_LK: [L, K] the experts each token has chosen, each 0 <= e < num_experts.
        num_experts: E.
        kernels: use the Triton kernels; by default on a GPU.
    """
    if experts_LK.numel() > LARGEST:
        raise FreeScaleError(
            "there are too many rows for the experts of one call",
            got=f"{experts_LK.numel()} choices",
            allowed=f"at most {LARGEST}",
            next_step="cut the batch into parts",
        )
    on_gpu = experts_LK.device.type == "cuda"
    if has_triton() and on_gpu if kernels is None else kernels:
        return _by_kernels(experts_LK, num_experts)
    return _by_loop(experts_LK, num_experts) if not on_gpu else _by_sort(experts_LK, num_experts)


def _empty(experts_LK: Tensor, num_experts: int) -> Routing:
    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts_LK.device)

    return Routing(ints(experts_LK.numel()), ints(*experts_LK.shape), ints(num_experts + 1))


def _by_loop(experts_LK: Tensor, num_experts: int) -> Routing:
    """On the CPU: one compiled loop."""
    from freescale.kernels.moe import routing_loops

    made = _empty(experts_LK, num_experts)
    flat = experts_LK.to(torch.int32).contiguous().view(-1)
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise FreeScaleError(
            "a token has chosen an expert that does not exist",
            got=f"{int(flat.min())} to {int(flat.max())}",
            allowed=f"0 to {num_experts - 1}",
        )
    views: list[Any] = [x.view(-1).numpy() for x in made]
    routing_loops.group(flat.numpy(), experts_LK.shape[1], *views)
    return made


def _by_sort(experts_LK: Tensor, num_experts: int) -> Routing:
    """Where there are neither compiled loops nor kernels: a GPU without Triton."""
    flat = experts_LK.reshape(-1)
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    edges = torch.arange(num_experts + 1, device=order.device)
    offsets = torch.searchsorted(flat[order].contiguous(), edges.to(flat.dtype))
    tokens = order // experts_LK.shape[1]
    return Routing(*(x.to(torch.int32) for x in (tokens, places.view(experts_LK.shape), offsets)))


def _by_kernels(experts_LK: Tensor, num_experts: int) -> Routing:
    """Count the choices of every tile, sum the counts up over the tiles of an expert, hand out places."""
    from freescale.kernels.moe.triton import routing as kernels

    made = _empty(experts_LK, num_experts)
    experts, num_choices = experts_LK.contiguous(), experts_LK.numel()
    tiles = -(-num_choices // COUNT_TILE)
    counts = torch.empty(num_experts, tiles, dtype=torch.int32, device=experts.device)
    sizes: dict[str, float] = {"num_choices": num_choices, "num_counts": tiles}
    shape = {"NUM_EXPERTS": num_experts, "TILE": COUNT_TILE}
    start_kernel(
        kernels.count_kernel,
        (tiles,),
        {"Experts": experts, "Counts": counts},
        sizes,
        {**shape, "num_warps": 4},
    )
    totals = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    scanned = {"Counts": counts, "Totals": totals}
    start_kernel(
        kernels.scan_kernel, (num_experts,), scanned, {"num_counts": tiles}, {"BLOCK": 1024, "num_warps": 4}
    )
    edges = {"Totals": totals, "Offsets": made.offsets}
    padded = _power(num_experts)
    start_kernel(
        kernels.offsets_kernel,
        (1,),
        edges,
        {},
        {"NUM_EXPERTS": num_experts, "BLOCK": padded, "num_warps": 4},
    )
    tensors = {"Experts": experts, "Counts": counts, **made._asdict()}
    start_kernel(
        kernels.position_kernel,
        (tiles,),
        {name.capitalize(): x for name, x in tensors.items()},
        sizes,
        {"CHOICES": experts.shape[1], "TILE": COUNT_TILE, "num_warps": 4},
    )
    return made


def tile_list(offsets: Tensor, num_rows: int) -> Tensor:
    """[num_tiles, 3] int32: expert, first row and end of the expert's rows; the expert is -1 where no tile is needed.

    How many tiles the experts need is known to the device only: the list has room for the most it can be.
    """
    from freescale.kernels.moe.triton import routing as kernels

    num_experts = len(offsets) - 1
    room = num_tiles(num_rows, num_experts)
    tiles = torch.empty(room, 3, dtype=torch.int32, device=offsets.device)
    constants = {"NUM_EXPERTS": num_experts, "BLOCK": _power(num_experts), "TILE": TILE_ROWS, "LIST": 32}
    start_kernel(
        kernels.tiles_kernel,
        (-(-room // 32),),
        {"Offsets": offsets, "Tiles": tiles},
        {"num_tiles": room},
        {**constants, "num_warps": 4},
    )
    return tiles


def _power(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())
