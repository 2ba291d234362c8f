"""Which exchanges finish while a kernel holds every SM."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from freescale.comm.transport import Transport
from freescale.comm.world.ranks import Ranks
from freescale.prove.stamped_rows import exchange, open_all, rows_of, synchronize_all, wanted_at, warm_up

CONTROLS = ("a tiny kernel", "a copy kernel of 8 blocks", "copy_ on the same GPU", "symmetric-memory barrier")
"""What must not finish while every SM is held."""

WAIT_S = 1.0
"""What is not through by then, beside a kernel that holds every SM, waits for that kernel."""


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Which calls finish while rank 0 holds every SM; ranks cannot hold a share each, because shares overlap."""
    from gpu_kernels import BlockCopy, Hog

    num_bytes = options.hog_kib << 10
    found, problems = open_all(ranks, options.kinds)
    # Rows that stay on their rank are copied in place, which takes SMs and no link.
    rows, counts = rows_of(ranks, num_bytes, own=False)
    wanted = wanted_at(ranks, num_bytes, own=False)
    landing = torch.empty_like(wanted, pin_memory=True)
    for transport in found.values():
        warm_up(transport, ranks, num_bytes)
    target, block_copy, small = torch.empty_like(rows), BlockCopy(8), torch.zeros(64, device=ranks.device)
    handle = symmetric_handle(ranks)

    def by(transport: Transport) -> Callable[[], None]:
        def act() -> None:
            landing.copy_(exchange(transport, rows, counts), non_blocking=True)

        return act

    tries: dict[str, Callable[[], None]] = {
        "a tiny kernel": lambda: small.add_(1),
        "a copy kernel of 8 blocks": lambda: block_copy(target, rows),
        "copy_ on the same GPU": lambda: target.copy_(rows),
    }
    if handle is not None:
        tries["symmetric-memory barrier"] = lambda: handle.barrier(channel=0)
    tries |= {name: by(transport) for name, transport in found.items()}
    # Every kernel is loaded before one spins, and every buffer of this stream is in its cache.
    stream = torch.cuda.Stream(ranks.device)
    for act in (*tries.values(), *tries.values()):
        with torch.cuda.stream(stream):
            act()
        synchronize_all(ranks)
    hog = Hog(ranks.device)
    holds = ranks.is_first
    results: dict[str, Any] = {}
    for name, act in tries.items():
        landing.zero_()
        synchronize_all(ranks)
        if holds:
            hog.hold()
        ranks.barrier()
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            act()
            event = torch.cuda.Event()
            event.record()
        done = finishes(event)
        seconds = time.perf_counter() - began
        still = hog.holds if holds else True
        right = torch.equal(landing, wanted) if name in found else None
        ranks.barrier()  # nobody gives SMs back before all have looked
        if holds:
            hog.release()
        stream.synchronize()
        after = torch.equal(landing, wanted) if name in found else None
        everybody = ranks.sum_on_cpu(
            torch.tensor([float(done), float(still), float(right is not False), float(after is not False)])
        )
        results[name] = {
            "finished_on": int(everybody[0]),
            "held_on": int(everybody[1]),
            "right_while_held": right is not None and int(everybody[2]) == ranks.num_ranks,
            "right_afterwards": int(everybody[3]) == ranks.num_ranks,
            "ms": 1000 * seconds,
        }
    engines = {name: [one.engine, one.sm_free] for name, one in found.items()}
    return {"sms": hog.num_sms, "results": results, "engines": engines, "not_available": problems}


def finishes(event: torch.cuda.Event) -> bool:
    """Whether a stream gets there within the time, without the host waiting in the driver."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if event.query():
            return True
        time.sleep(0.001)
    return False


def symmetric_handle(ranks: Ranks) -> Any:
    """Symmetric memory of these ranks, for its barrier; None where it cannot be set up."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        assert ranks.group is not None
        return symmetric.rendezvous(symmetric.empty(1024, device=ranks.device), ranks.group)
    except Exception as error:
        if ranks.is_first:
            print(f"no symmetric memory: {error}", file=sys.stderr)
        return None


def show(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The table."""
    print(f"  {'while every SM is held':<28} {'finished on':>12} {'rows right':>11} {'ms':>8}")
    missed = []
    for name, row in result["results"].items():
        right = "-" if name not in result["engines"] else "yes" if row["right_while_held"] else "no"
        print(f"  {name:<28} {row['finished_on']:>9} / {options.ranks} {right:>11} {row['ms']:8.2f}")
        if name == "host_staged" and not (row["finished_on"] == options.ranks and row["right_while_held"]):
            missed.append("host_staged did not finish with the right rows while every SM was held")
        if name in CONTROLS and row["finished_on"]:
            missed.append(
                f"negative control: {name} finished on {row['finished_on']} ranks, so SMs were free"
            )
        if not row["right_afterwards"]:
            missed.append(f"{name}: wrong rows afterwards")
    return missed
