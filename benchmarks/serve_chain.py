"""A server that follows a chain, asked without a pause through many refreshes: failures, mixed answers, p99, memory.

    python benchmarks/serve_chain.py [--refreshes 100] [--items 20000] [--clients 3] [--pause 0.5]

`freescale serve` is a process of its own. Another publishes a delta every --pause seconds: a twentieth of the vectors
changed, a hundredth of the items gone, as many new. Clients ask one request after the other. What every version must
answer is worked out first, by a model that was loaded from that version alone; an answer that is not the one of the
version it names is a mixed one. Memory is that of the server after the tenth refresh and after the last.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale.app.run.opened_run import open_run, write_run_export
from freescale.data import append_log
from freescale.exports import Publisher, exported_version, read_version
from freescale.recipe import load_config
from freescale.train import read_meta, saved_in


def first_version(folder: Path, num_items: int) -> Any:
    """The dense part of a run of a few steps, and random vectors of so many items."""
    rng = np.random.default_rng(0)
    events = [f"{user},{item},{n}" for n, (user, item) in enumerate(rng.integers(0, 50, (500, 2)))]
    (folder / "events.csv").write_text("user,item,time\n" + "\n".join(events) + "\n")
    append_log(folder / "log", folder / "events.csv", max_length=50)
    words = [f"data.path={folder}/log", f"run.out={folder}/run", "embedding.id_map=hash", "embedding.rows=64"]
    words += ["model.dim=64", "model.layers=2", "data.max_length=50", "run.device=cpu", "run.steps=2"]
    subprocess.run([sys.executable, "-m", "freescale", "train", *words], check=True, capture_output=True)
    config, run, _ = open_run(folder / "run", device="cpu")
    path = saved_in(folder / "run" / "checkpoints")[-1]
    version = read_version(write_run_export(folder / "full", config, run, read_meta(path), folder / "run"))
    assert load_config(folder / "run" / "config.yaml").model.dim == 64
    vectors = rng.normal(scale=0.02, size=(num_items, version.vectors.shape[1])).astype(np.float32)
    manifest = {**version.manifest, "num_items": num_items}
    return replace(version, manifest=manifest, ids=np.arange(num_items) * 7, vectors=vectors)


def changed(version: Any, seed: int) -> Any:
    """A twentieth of the vectors changed, a hundredth of the items gone, as many new."""
    rng = np.random.default_rng(seed)
    num = len(version.ids)
    vectors = version.vectors.copy()
    some = rng.choice(num, num // 20, replace=False)
    vectors[some] += rng.normal(scale=0.01, size=(len(some), vectors.shape[1])).astype(np.float32)
    keep = np.ones(num, bool)
    keep[rng.choice(np.arange(5, num), num // 100, replace=False)] = False  # the history stays
    new = int(version.ids.max()) + 1 + np.arange(num // 100)
    more = rng.normal(scale=0.02, size=(len(new), vectors.shape[1])).astype(np.float32)
    return replace(
        version,
        manifest={**version.manifest, "trained_steps": seed},
        ids=np.concatenate([version.ids[keep], new]),
        vectors=np.concatenate([vectors[keep], more]),
    )


def memory_mib(pid: int) -> float:
    """Memory of a process that is in use."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) / 1024  # type: ignore[union-attr]


def ask(address: str, body: bytes, found: list[Any], done: threading.Event) -> None:
    """Ask until told to stop."""
    while not done.is_set():
        begun = time.perf_counter()
        try:
            answer = json.loads(urllib.request.urlopen(f"{address}/recommend", body, timeout=60).read())
            found.append((answer["seq"], answer["items"], time.perf_counter() - begun))
        except Exception as error:
            found.append((None, repr(error), time.perf_counter() - begun))


def main() -> None:
    """Print what was found, and a JSON object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refreshes", type=int, default=100)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    request = {"history": [0, 7, 14, 21, 28], "times": [1, 2, 3, 4, 5], "k": 10}
    versions, wanted = [first_version(folder, args.items)], []
    for seed in range(args.refreshes):
        versions.append(changed(versions[-1], seed + 1))
    for version in versions:
        answer = exported_version(version).recommend(**request)
        wanted.append(json.loads(json.dumps(answer)))
    publisher = Publisher(folder / "chain")
    publisher.publish(versions[0], {"step": 0})
    command = [sys.executable, "-m", "freescale", "serve", str(folder / "chain"), "--port", "0"]
    server = subprocess.Popen([*command, "--refresh", "0.02"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+:\d+", server.stdout.readline()).group(0)  # type: ignore[union-attr]
    threading.Thread(target=server.stdout.read, daemon=True).start()
    found: list[Any] = []
    done = threading.Event()
    body = json.dumps(request).encode()
    clients = [threading.Thread(target=ask, args=(address, body, found, done)) for _ in range(args.clients)]
    for client in clients:
        client.start()
    memory, sizes = [], []
    time.sleep(2)
    for number, version in enumerate(versions[1:], 1):
        sizes.append(publisher.publish(version, {"step": number}).num_bytes)
        deadline = time.monotonic() + 60
        while found[-1][0] != number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found[-1][0] == number, f"version {number} does not answer"
        time.sleep(args.pause)
        memory.append(memory_mib(server.pid))
    done.set()
    for client in clients:
        client.join()
    health = json.loads(urllib.request.urlopen(f"{address}/health", timeout=60).read())
    server.terminate()
    server.wait()
    shutil.rmtree(folder)
    failed = [text for seq, text, _ in found if seq is None]
    mixed = sum(answer != wanted[seq] for seq, answer, _ in found if seq is not None)
    seconds = np.array([took for _, _, took in found])
    result = {
        "requests": len(found),
        "refreshes": health["refreshes"],
        "failed": len(failed),
        "not_of_one_version": mixed,
        "versions_that_answered": len({seq for seq, _, _ in found}),
        "client_p50_ms": float(np.percentile(seconds, 50) * 1000),
        "client_p99_ms": float(np.percentile(seconds, 99) * 1000),
        "client_worst_ms": float(seconds.max() * 1000),
        "server_p50_ms": health["p50_ms"],
        "server_p99_ms": health["p99_ms"],
        "memory_mib_after_10": memory[min(9, len(memory) - 1)],
        "memory_mib_at_end": memory[-1],
        "memory_mib_most": max(memory),
        "delta_bytes": int(np.median(sizes)),
    }
    for name, value in result.items():
        print(f"{name:26} {value:,.1f}" if isinstance(value, float) else f"{name:26} {value:,}")
    if failed:
        print(failed[0])
    assert not failed
    assert not mixed
    print(json.dumps(result))


if __name__ == "__main__":
    main()
