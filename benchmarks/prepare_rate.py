"""How long `freescale prepare` takes for a large CSV, and how much memory, whatever the size of the file.

    python benchmarks/prepare_rate.py [--events 10000000] [--items 1000000] [--users 250000] [--ids int|text]
                                      [--extra 0] [--memory-mb 512] [--folder DIR] [--rounds 1]

The file is made up: event n of N is of a user drawn by a hash of n and of item n modulo the number of items, so every
item occurs, and times are out of order; `--extra` bytes a line are of a column nobody asks for. `prepare` runs as the
command, in a process of its own; its peak is the VmHWM of that process. Checked before anything is printed: events and
items are as many as were written, and the histories of fifty users are, event by event, what a sort of their events
gives. Spilled runs and the data set lie in the folder beside the file; all of it is removed in the end. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

CHUNK = 1 << 20
BASE = 1_700_000_000
CHECKED_USERS = 50


def events(first: int, last: int, *, users: int, items: int) -> dict[str, np.ndarray]:
    """Events first to last - 1, as numbers."""
    n = np.arange(first, last, dtype=np.uint64)
    drawn = n * np.uint64(0x9E3779B97F4A7C15)
    drawn ^= drawn >> np.uint64(29)
    drawn *= np.uint64(0xBF58476D1CE4E5B9)
    drawn ^= drawn >> np.uint64(32)
    return {
        "user": (drawn % np.uint64(users)).astype(np.int64),
        "item": (n % np.uint64(items)).astype(np.int64),
        "time": BASE + ((drawn >> np.uint64(20)) % np.uint64(30_000_000)).astype(np.int64),
    }


def words(prefix: str, numbers: np.ndarray, width: int) -> pa.Array:
    digits = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), width=width, padding="0")
    return pc.binary_join_element_wise(prefix, digits, "")


def write_csv(path: Path, args: argparse.Namespace) -> None:
    """The file, a chunk at a time."""
    with path.open("wb") as sink:
        for first in range(0, args.events, CHUNK):
            made = events(first, min(first + CHUNK, args.events), users=args.users, items=args.items)
            columns: dict[str, object] = dict(made)
            if args.ids == "text":
                columns |= {"user": words("user-", made["user"], 9), "item": words("B", made["item"], 10)}
            more = (
                {"page": pa.array(["/" + "x" * (args.extra - 2)] * len(made["user"]))} if args.extra else {}
            )
            named = {"user_id": columns["user"], "item_id": columns["item"], "timestamp": columns["time"]}
            rows = pa.table({**named, **more})
            options = pa_csv.WriteOptions(include_header=first == 0, quoting_style="none")
            pa_csv.write_csv(rows, sink, options)


def true_histories(args: argparse.Namespace) -> dict[object, list[int]]:
    """Items of a few users, in the order of their times."""
    wanted = np.linspace(0, args.users - 1, CHECKED_USERS).astype(np.int64)
    parts = []
    for first in range(0, args.events, CHUNK):
        made = events(first, min(first + CHUNK, args.events), users=args.users, items=args.items)
        keep = np.isin(made["user"], wanted)
        parts.append(np.stack([made[name][keep] for name in ("user", "time", "item")]))
    user, when, item = np.concatenate(parts, axis=1)
    order = np.lexsort((np.arange(len(user)), when, user))
    return {int(one): item[order][user[order] == one].tolist() for one in np.unique(user)}


def check(out: Path, args: argparse.Namespace) -> None:
    """The data set is what was written, or nothing is printed."""
    manifest = json.loads((out / "dataset.json").read_text())
    assert (manifest["num_events"], manifest["num_items"]) == (args.events, args.items), manifest
    assert manifest["dropped_users"] == 0
    truth = true_histories(args)
    names = dict.fromkeys(truth)
    if args.ids == "text":
        table = pq.read_table(out / "words-user.parquet")
        told = {f"user-{user:09d}": user for user in truth}
        here = table.filter(pc.is_in(table["word"], pa.array(list(told)))).to_pylist()
        names = {row["id"]: told[row["word"]] for row in here}
    else:
        names = {user: user for user in truth}
    found = 0
    for shard in manifest["shards"]:
        column = pq.read_table(out / shard["file"], columns=["user"])["user"]
        rows = np.flatnonzero(np.isin(column.to_numpy(), list(names)))
        if not len(rows):
            continue
        table = pq.read_table(out / shard["file"], columns=["user", "item"]).take(rows)
        for row in table.to_pylist():
            items = np.array(row["item"])
            if args.ids == "text":
                items = numbers_of_words(out / "words-item.parquet", items)
            assert items.tolist() == truth[names[row["user"]]], names[row["user"]]
            found += 1
    assert found == len(truth), (found, len(truth))


_ITEM_WORDS: dict[str, pa.Table] = {}


def numbers_of_words(path: Path, ids: np.ndarray) -> np.ndarray:
    """What the words of these ids say: `B0000000012` is 12. The file's ids ascend."""
    if not _ITEM_WORDS:
        _ITEM_WORDS["table"] = pq.read_table(path)
        _ITEM_WORDS["ids"] = _ITEM_WORDS["table"]["id"].to_numpy()
    at = np.searchsorted(_ITEM_WORDS["ids"], ids)
    assert (_ITEM_WORDS["ids"][at] == ids).all()
    return np.array([int(word[1:]) for word in _ITEM_WORDS["table"]["word"].take(at).to_pylist()])


def prepare(raw: Path, out: Path, args: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds, CPU seconds and MiB at the peak of the command."""
    command = [
        sys.executable,
        "-m",
        "freescale",
        "prepare",
        str(raw),
        str(out),
        "--memory-mb",
        str(args.memory_mb),
    ]
    started, peak = time.perf_counter(), 0.0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    # Not maxrss, which begins with what the process that forked it had.
    while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
        peak = max(peak, peak_mib(child.pid))
        time.sleep(0.02)
    seconds, (_, status, usage) = time.perf_counter() - started, ended
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    return seconds, usage.ru_utime + usage.ru_stime, peak


def peak_mib(pid: int) -> float:
    """Of a process so far; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=250_000)
    parser.add_argument("--ids", choices=("int", "text"), default="int")
    parser.add_argument("--extra", type=int, default=0)
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prepare-rate-", dir=args.folder))
    try:
        raw, out, rounds = folder / "events.csv", folder / "data", []
        write_csv(raw, args)
        size = raw.stat().st_size
        for number in range(args.rounds):
            rounds.append(prepare(raw, out, args))
            if number == 0:
                check(out, args)
            written = sum(file.stat().st_size for file in out.iterdir())
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size_words = f"{args.events:,} events, {args.users:,} users, {args.items:,} items, {args.ids} ids"
    print(f"{size_words}: {size / 1e9:.2f} GB of CSV")
    print("round   seconds   CPU seconds   M events/s   peak MiB")
    for number, (seconds, cpu, peak) in enumerate(rounds):
        print(f"{number + 1:5d}{seconds:10.1f}{cpu:14.1f}{args.events / seconds / 1e6:13.2f}{peak:11.0f}")
    names = ("seconds", "cpu_seconds", "peak_mib")
    facts = {name: value for name, value in vars(args).items() if name != "folder"}
    facts |= {"csv_bytes": size, "data_bytes": written, "rounds": [dict(zip(names, one)) for one in rounds]}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
