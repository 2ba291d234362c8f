r"""Many exchanges with random uneven splits: every row checked, nothing leaked, a killed rank named.

    python benchmarks/transport_soak.py --exchanges 100000 --budget-s 400                   # one GPU, 4 ranks
    python benchmarks/transport_soak.py --device cpu --ranks 3 --exchanges 3000

Three parts for each transport: the soak; one rank killed in the middle, the others must raise and name it; and a
restart, which must work as if nothing had happened. The first thing that is wrong ends the program.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from freescale.comm.transports.registry import make_transport
from freescale.comm.world import launcher as launcher
from freescale.comm.world.joining import join_ranks
from freescale.comm.world.ranks import Ranks
from freescale.comm.world.shared_gpu.shares import virtual_gpus
from freescale.errors import FreeScaleError
from freescale.prove.soak import Checker, Soak

LOOK_EVERY = 250
TIMEOUT_S = 20.0
MARK = "FREESCALE_SOAK"
"""A variable of all processes that are started from here."""


def facts_of(device: torch.device) -> dict[str, float]:
    """What a leak would show in."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    found = {name: int(status.get(name, 0)) / 1024 for name in ("VmRSS", "VmLck", "VmPin")}
    found["maps"] = len(Path("/proc/self/maps").read_text().splitlines())
    found["files"] = len(os.listdir("/proc/self/fd"))
    if device.type == "cuda":
        found["gpu MiB"] = torch.cuda.memory_allocated() / 2**20
    return found


def soak(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Exchange, check, and look for what grows."""
    assert ranks.group is not None
    transport = make_transport(ranks.group, device=ranks.device, kind=options.transport, timeout_s=TIMEOUT_S)
    checker = Checker(ranks)
    began, before, done = time.monotonic(), {}, 0
    exchanges = Soak(ranks, transport, checker).exchanges(options.exchanges)
    for exchange in exchanges:
        if exchange == options.die_at and ranks.rank == ranks.num_ranks - 1:
            if ranks.device.type == "cuda":
                # A client of MPS that ends with work under way may take the server, and so the others, with it.
                torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        done = exchange + 1
        if done % LOOK_EVERY == 0:
            bad = torch.tensor([checker.num_bad(), int(time.monotonic() - began > options.seconds)])
            bad = ranks.sum_on_cpu(bad)
            if bad[0]:
                raise SystemExit(f"FAILED: {int(bad[0])} wrong numbers by exchange {done}")
            if not before and done >= min(1000, options.exchanges // 2):
                before = facts_of(ranks.device)
            if bad[1]:
                exchanges.close()
                break
    seconds = time.monotonic() - began
    bad = ranks.sum_on_cpu(torch.tensor([checker.num_bad()]))
    after = facts_of(ranks.device)
    grown = {name: after[name] - value for name, value in before.items()}
    everybody: list[Any] = [None] * ranks.num_ranks
    torch.distributed.all_gather_object(everybody, grown, group=ranks.control)
    worst = {name: max(each.get(name, 0.0) for each in everybody) for name in grown}
    return {
        "exchanges": done,
        "wrong": int(bad),
        "seconds": seconds,
        "us_each": 1e6 * seconds / max(1, done),
        "grown": worst,
        "engine": transport.engine,
        "sm_free": transport.sm_free,
    }


def as_rank(options: argparse.Namespace) -> None:
    """One rank; what it found, or what it was told when another died, goes into a file."""
    note = Path(options.folder) / f"soak-{os.environ['RANK']}.json"
    began = time.monotonic()
    try:
        with join_ranks(device=options.device, timeout_s=TIMEOUT_S) as ranks:
            result = soak(ranks, options)
            ranks.barrier()
            note.write_text(json.dumps(result))
            os._exit(0)
    except Exception as error:
        heard = {
            "error": f"{type(error).__name__}: {error}",
            "seconds": time.monotonic() - began,
        }
        note.write_text(json.dumps(heard))
        os._exit(1)


def start(
    options: argparse.Namespace, kind: str, exchanges: int, *, die_at: int = -1
) -> list[dict[str, Any]]:
    """Run ranks to their end; the notes they left."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["--rank", "--device", options.device, "--transport", kind, "--folder", folder]
        command += ["--exchanges", str(exchanges), "--die-at", str(die_at)]
        command += ["--seconds", str(options.budget_s)]
        sharing = nullcontext(None) if options.device == "cpu" else virtual_gpus(options.ranks)
        try:
            with sharing as shared:
                environment = shared.environment if shared else {"OMP_NUM_THREADS": "1"}
                launcher.launch(
                    command, num_ranks=options.ranks, environment=environment, program=(__file__,)
                )
        except FreeScaleError as error:
            if die_at < 0:
                raise SystemExit(f"FAILED: {kind}: {error}\n{read_notes(folder)}") from None
            notes = read_notes(folder)
            if kind == "collective":
                # Its ranks stand in a library that tells them of nobody: their launcher does, and ends them.
                notes = [{"rank": rank, "error": str(error)} for rank in range(options.ranks - 1)]
            return notes
        return read_notes(folder)


def read_notes(folder: str) -> list[dict[str, Any]]:
    return [
        {"rank": int(path.stem.split("-")[1]), **json.loads(path.read_text())}
        for path in sorted(Path(folder).glob("soak-*.json"))
    ]


def left_over() -> set[str]:
    """Names in shared memory and of sockets that a run could leave behind."""
    shm = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    sockets = Path("/proc/net/unix").read_text().split()
    return shm | {word for word in sockets if word.startswith("@freescale")}


def is_a_neighbours(name: str) -> bool:
    """Whether a process maps it that was not started from here."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            mapped = any(line.endswith(f" {name}") for line in (process / "maps").read_text().splitlines())
            if mapped and MARK.encode() not in (process / "environ").read_bytes():
                return True
    return False


def examine(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The three parts for one transport."""
    before = left_over()
    (found,) = [note for note in start(options, kind, options.exchanges) if note["rank"] == 0]
    # Staging buffers and allocator caches settle; what grows with the number of exchanges does not.
    limits = {"VmRSS": 256.0, "VmLck": 1.0, "VmPin": 64.0, "maps": 200, "files": 4, "gpu MiB": 64.0}
    leaks = {name: value for name, value in found["grown"].items() if value > limits[name]}
    killed = start(options, kind, 2000, die_at=300)
    victim = options.ranks - 1
    heard = [note for note in killed if note["rank"] != victim]
    named = [
        note
        for note in heard
        if {f"rank {victim}", f"[{victim}]"} & set(re.findall(r"rank \d+|\[\d+\]", note.get("error", "")))
    ]
    (again,) = [note for note in start(options, kind, 300) if note["rank"] == 0]
    left = sorted(name for name in left_over() - before if not is_a_neighbours(name))
    return {
        **found,
        "leaks": leaks,
        "told_of_the_death": len([note for note in heard if "error" in note]),
        "named_the_dead_rank": len(named),
        "what_they_said": heard[0].get("error", "") if heard else "",
        "restart_wrong": again["wrong"],
        "left_over": left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--transports", help="host_staged,copy_engine; on CPU ranks host_staged,local")
    parser.add_argument("--exchanges", type=int, default=100_000)
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds of soaking a transport")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--die-at", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1e9, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        as_rank(options)
    os.environ[MARK] = "1"
    usual = "host_staged,local" if options.device == "cpu" else "host_staged,copy_engine"
    transports = (options.transports or usual).split(",")
    results, bad = {}, []
    for kind in transports:
        # The others shall hear of a death by themselves, where they can.
        launcher._GRACE_S = 5.0 if kind == "collective" else TIMEOUT_S + 10
        row = results[kind] = examine(kind, options)
        others = options.ranks - 1
        print(
            f"{kind} ({row['engine']}): {row['exchanges']:,} exchanges in {row['seconds']:.0f} s "
            f"({row['us_each']:.0f} us each), wrong numbers {row['wrong']}, grown {row['grown']}"
        )
        print(
            f"  after SIGKILL of a rank {row['told_of_the_death']} of {others} others raised, "
            f"{row['named_the_dead_rank']} named it ({row['what_they_said']!r}); "
            f"restart: {row['restart_wrong']} wrong; left over: {row['left_over'] or 'nothing'}"
        )
        if row["wrong"] or row["leaks"] or row["left_over"] or row["restart_wrong"]:
            bad.append(f"{kind}: wrong rows, leaks {row['leaks']} or leftovers")
        if row["named_the_dead_rank"] < others:
            bad.append(f"{kind}: {row['named_the_dead_rank']} of {others} ranks named the dead one")
    facts = {"ranks": options.ranks, "torch": torch.__version__, "date": str(datetime.date.today())}
    facts["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print("FAILED: " + "; ".join(bad) if bad else "all checks passed")
    print(json.dumps({"claim": "transport_soak", "results": results, "failed": bad, **facts}))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
