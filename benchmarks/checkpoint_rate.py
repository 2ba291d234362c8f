"""How fast a checkpoint is saved and resumed from, against `dd` on the same disk, and how long training stands still.

    python benchmarks/checkpoint_rate.py [--gb 4] [--rounds 3] [--device cpu|cuda] [--folder DIR]

One table with row-wise Adagrad is the state. First a small one goes to disk and back while its rows change, and must
come back bit for bit as it was, or no speed is printed. Then rounds alternate on the same disk: dd writes as many bytes
(zeros, conv=fsync), a checkpoint is saved while steps change rows of the table, dd reads both files cold, the table is
filled from the checkpoint, cold again. Cold: dropped from the page cache file by file. Resuming is held against both
reads: the checkpoint has the same bytes, but was written by us; the other file was written by dd, but holds zeros. On a
machine that others use, too, rounds differ by more than the ratios: look at all of them.

Blocked is the time in `Checkpoints.save`, as a share of the save from there until every byte is on disk. A step gathers
and updates rows drawn at random; how long one takes while a checkpoint is written is printed beside it, too, since it
shares the cores with the writer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from freescale.comm.world import Ranks
from freescale.embedding import EmbeddingTable, RowwiseAdagrad
from freescale.train.state.checkpoint import Checkpoints
from freescale.train.state.saved import load_tensors

DIM = 128
STEP_ROWS = 4096


def make_table(num_bytes: float, device: torch.device, *, filled: bool = True) -> EmbeddingTable:
    """A table of about this size with its state; other values than a fresh one where it is filled."""
    rows = int(num_bytes // (4 * DIM + 4))
    table = EmbeddingTable(1, DIM, optimizer=RowwiseAdagrad(), device=device)
    table.weight = torch.empty(rows, DIM, device=device)
    table.state = {
        name: torch.zeros(rows, part.shape[1], device=device) for name, part in table.state.items()
    }
    for values in (table.weight, *table.state.values()):
        values.uniform_() if filled else values.fill_(-1)
    return table


def tensors_of(table: EmbeddingTable) -> dict[str, torch.Tensor]:
    return {f"table.{name}": values for name, values in {"weight": table.weight, **table.state}.items()}


def learn(table: EmbeddingTable, step: int) -> float:
    """Look up and update rows drawn at random; seconds."""
    start = time.perf_counter()
    rows = torch.randint(len(table.weight), (STEP_ROWS,), device=table.weight.device).unique()
    table.apply(rows, table.gather(rows), lr=0.01, step=step)
    if table.weight.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def save(checkpoints: Checkpoints, table: EmbeddingTable, step: int) -> dict[str, float]:
    """Save while steps go on; seconds of the whole, of standing still, and of a step meanwhile."""
    start = time.perf_counter()
    checkpoints.save(step, tensors_of(table), {}, tables=[table])
    blocked = time.perf_counter() - start
    steps = []
    while checkpoints.finished() is None:
        steps.append(learn(table, len(steps) + 1))
        time.sleep(0.02)  # a model that computes beside its table
    return {
        "save": time.perf_counter() - start,
        "blocked": blocked,
        "step_ms": 1000 * statistics.median(steps) if steps else 0.0,
    }


def check(folder: Path, ranks: Ranks, num_bytes: float) -> None:
    """Bit for bit as it was when the save began, whatever changes meanwhile; raises AssertionError otherwise."""
    table = make_table(num_bytes, ranks.device)
    wanted = {name: values.clone() for name, values in tensors_of(table).items()}
    checkpoints = Checkpoints(folder, ranks=ranks)
    save(checkpoints, table, 1)
    again = make_table(num_bytes, ranks.device, filled=False)
    latest = checkpoints.latest()
    assert latest is not None
    load_tensors(latest, tensors_of(again), ranks=ranks)
    for name, values in tensors_of(again).items():
        assert torch.equal(values, wanted[name]), name
    assert not torch.equal(table.weight, again.weight), "nothing changed while it was saved: shows nothing"


def dd(*arguments: str) -> float:
    """Seconds, as dd itself says."""
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(["dd", *arguments], capture_output=True, text=True, check=True, env=plain)
    found = re.search(r"([\d.e+-]+) s,", done.stderr)
    assert found, done.stderr
    return float(found[1])


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def one_round(folder: Path, table: EmbeddingTable, checkpoints: Checkpoints, number: int) -> dict[str, float]:
    """What dd does and what we do, in turn: GB/s and shares."""
    num_bytes = sum(values.nbytes for values in tensors_of(table).values())
    blocks, file = num_bytes >> 24, folder / "dd.bin"
    written = dd("if=/dev/zero", f"of={file}", "bs=16M", f"count={blocks}", "conv=fsync")
    idle = statistics.median(learn(table, step) for step in range(1, 51))
    saved = save(checkpoints, table, number)
    latest = checkpoints.latest()
    assert latest is not None
    (shard,) = latest.glob("*.safetensors")
    drop_from_cache([shard, file])
    read = dd(f"if={shard}", "of=/dev/null", "bs=16M")
    zeros = dd(f"if={file}", "of=/dev/null", "bs=16M")
    file.unlink()
    resumed = load_cold(latest, table)
    dd_bytes = blocks << 24
    return {
        "dd_write": dd_bytes / written / 1e9,
        "save": num_bytes / saved["save"] / 1e9,
        "save_of_dd": num_bytes / saved["save"] / (dd_bytes / written),
        "blocked_s": saved["blocked"],
        "blocked_share": saved["blocked"] / saved["save"],
        "step_ms": 1000 * idle,
        "step_saving_ms": saved["step_ms"],
        "dd_read": num_bytes / read / 1e9,
        "dd_read_zeros": dd_bytes / zeros / 1e9,
        "resume": num_bytes / resumed / 1e9,
        "resume_of_dd": read / resumed,
        "resume_of_dd_zeros": num_bytes / resumed / (dd_bytes / zeros),
    }


def load_cold(path: Path, table: EmbeddingTable) -> float:
    """Seconds to fill the table from a checkpoint that no memory holds any more."""
    drop_from_cache(list(path.iterdir()))
    device = table.weight.device
    start = time.perf_counter()
    load_tensors(path, tensors_of(table), ranks=Ranks(rank=0, num_ranks=1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


LABELS = {
    "dd_write": "dd write, GB/s",
    "save": "save, GB/s",
    "save_of_dd": "save / dd",
    "blocked_s": "blocked, s",
    "blocked_share": "blocked / save",
    "step_ms": "step, ms",
    "step_saving_ms": "step while saving, ms",
    "dd_read": "dd cold read of the checkpoint, GB/s",
    "dd_read_zeros": "dd cold read of zeros, GB/s",
    "resume": "resume, GB/s",
    "resume_of_dd": "resume / dd of the checkpoint",
    "resume_of_dd_zeros": "resume / dd of zeros",
}


def show(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Print the table; returns the medians."""
    print("| | " + " | ".join(f"round {number + 1}" for number in range(len(rounds))) + " | median |")
    print("|---" * (len(rounds) + 2) + "|")
    medians = {name: statistics.median(one[name] for one in rounds) for name in LABELS}
    for name, label in LABELS.items():
        values = [*(one[name] for one in rounds), medians[name]]
        print(f"| {label} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return {name: round(value, 4) for name, value in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one unless given")
    options = parser.parse_args()
    ranks = Ranks(rank=0, num_ranks=1, device=torch.device(options.device))
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-rate-", dir=options.folder))
    try:
        check(folder / "small", ranks, min(2e8, options.gb * 1e9))
        print(f"bit for bit as it was; {options.gb:g} GB, {options.device}, torch {torch.__version__}\n")
        table = make_table(options.gb * 1e9, ranks.device)
        checkpoints = Checkpoints(folder / "checkpoints", ranks=ranks, keep=1)
        checkpoints.reserve(tensors_of(table))
        rounds = [one_round(folder, table, checkpoints, number + 1) for number in range(options.rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = show(rounds)
    print()
    print(json.dumps({"gb": options.gb, "device": options.device, "rounds": len(rounds), **medians}))


if __name__ == "__main__":
    main()
