"""One rank of two_nodes.py: trains what the plan names, with rank 1 late or stopped, and notes what two_nodes.py asks.

Noted are the bytes of every exchange, and of every step how long the training thread had or wanted a core: between two
forwards, its CPU time and the time it stood in line for a core (/proc/thread-self/schedstat), and how long it slept
where a model on a device of its own would compute. The rest it waited for others, for it sleeps nowhere else. Before
anything is trained, plain sockets measure what the wire takes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.comm.transports.kinds.collective import CollectiveTransport
from freescale.comm.world import Ranks, join_ranks
from freescale.recipe import build_run, build_source, load_config
from freescale.trace import current_stage
from freescale.train import Progress, Run, train

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.small_run import Recorder

LATE_S = 0.06
STOP_S, STOP_EVERY = 0.4, 4
PROBED_BYTES = (0, 8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10)
STOPPED_MS = 50.0
"""Later than that no sleep ends by itself."""
PROBES, MOST_PROBES = 5, 60
PROBE_PORT = 29600
Move = tuple[str, int | None, list[int]]
"""Stage, step, and bytes sent to every rank."""
RECIPE = (
    *("synthetic.users=2000", "synthetic.items=4000", "synthetic.mean_length=30", "data.max_length=60"),
    *("data.global_batch=32", "model.dim=32", "model.dropout=0", "model.dtype=float64"),
    *("run.device=cpu", "run.log_every=100000", "run.eval_every=null", "run.checkpoint_every=null"),
    *("pipeline.decide_every=null", "balance.refit_every=null", "eval.max_users=8"),
)


def rank_main(plan: Path) -> None:
    """Train everything the plan names; rank 0 writes down what it heard."""
    torch.set_num_threads(1)
    tasks = json.loads(plan.read_text())
    source = None
    with join_ranks(device="cpu") as ranks:
        pids, wire = _pids(ranks), probe(ranks)
        moves = note_moves()
        for task in tasks:
            keys = [*RECIPE, *task["keys"], f"run.out={plan.parent}/{task['name']}"]
            config = load_config(None, keys)
            source = source or build_source(config)
            recorder = Recorder()
            run = build_run(config, source, ranks, Progress([recorder]))
            plant(task["planted"], run, ranks.rank, pids)
            slept = compute_on_a_device(run, task["device_ms"])
            moments = note_cores(run, slept)
            moves.clear()
            train(run, resume_from=None)
            everybodys, cores, held = (_gathered(each, ranks) for each in (moves, moments, slept[1:]))
            if ranks.is_first:
                heard = {
                    "steps": recorder.of("step"),
                    "moves": everybodys,
                    "cores": cores,
                    "held": held,
                    "wire": wire,
                }
                Path(plan.parent, f"{task['name']}.json").write_text(json.dumps(heard))


def probe(ranks: Ranks) -> list[tuple[int, float]]:
    """Bytes, and the milliseconds from asking for them to having them all, from the last rank to the first."""
    took: list[tuple[int, float]] = []
    if ranks.num_ranks == 1:
        return took
    if ranks.rank == ranks.num_ranks - 1:
        with socket.create_server(("", PROBE_PORT)) as server, server.accept()[0] as asked:
            asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while ask := asked.recv(8):
                asked.sendall(bytes(int.from_bytes(ask) + 1))
    elif ranks.is_first:
        with _connected("node-b") as asking:
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for num_bytes in PROBED_BYTES:
                took.append((num_bytes, _settled(asking, num_bytes)))
    return took


def _settled(asking: socket.socket, num_bytes: int) -> float:
    """What a size takes when asking again makes it no shorter: the window of the wire opens first."""
    tries = [_ask(asking, num_bytes) for _ in range(2 * PROBES)]
    while len(tries) < MOST_PROBES and min(tries[-PROBES:]) < 0.98 * min(tries[:-PROBES]):
        tries += [_ask(asking, num_bytes) for _ in range(PROBES)]
    return statistics.median(tries[-PROBES:])


def _connected(host: str) -> socket.socket:
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, PROBE_PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _ask(asking: socket.socket, num_bytes: int) -> float:
    time.sleep(0.1)  # about as long as between two exchanges of a step
    start, missing = time.perf_counter(), num_bytes + 1
    asking.sendall(num_bytes.to_bytes(8))
    while missing:
        missing -= len(asking.recv(missing))
    return 1e3 * (time.perf_counter() - start)


def plant(what: str, run: Run, rank: int, pids: Sequence[int]) -> None:
    """Let rank 1 sleep, or be stopped by rank 0."""
    model, dice, calls = run.state.model, random.Random(0), itertools.count()

    def late(*_: object) -> None:
        time.sleep(LATE_S)

    def stop(after_s: float) -> None:
        time.sleep(after_s)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pids[1], signal.SIGCONT)

    def stopped(*_: object) -> None:
        if model.training and next(calls) % STOP_EVERY == 0:
            threading.Thread(target=stop, args=(dice.uniform(0.0, 0.2),)).start()

    if what == "late" and rank == 1:
        model.register_forward_pre_hook(late)
    if what == "stopped" and rank == 0:
        model.register_forward_pre_hook(stopped)


def compute_on_a_device(run: Run, device_ms: float) -> list[float]:
    """From now on every forward takes so long besides, on no core of this machine.

    How long it took so far, and then, forward by forward, by how much a rank that was stopped meanwhile came too
    late: a device goes on while its host stands still.
    """
    slept = [0.0]

    def compute(*_: object) -> None:
        start = time.perf_counter()
        time.sleep(device_ms / 1e3)
        took = 1e3 * (time.perf_counter() - start)
        held = took - device_ms if took > device_ms + STOPPED_MS else 0.0
        slept[0] += took - held
        if run.state.model.training:
            slept.append(held)

    run.state.model.register_forward_pre_hook(compute)
    return slept


def note_cores(run: Run, slept: Sequence[float]) -> list[float]:
    """From now on, at every forward, how many milliseconds this thread has computed or wanted a core so far."""
    moments: list[float] = []

    def note(*_: object) -> None:
        if run.state.model.training:
            had, in_line, _count = Path("/proc/thread-self/schedstat").read_text().split()
            moments.append((int(had) + int(in_line)) / 1e6 + slept[0])

    run.state.model.register_forward_pre_hook(note)
    return moments


def _pids(ranks: Ranks) -> list[int]:
    pids = [os.getpid()] * ranks.num_ranks
    if ranks.control is not None:
        dist.all_gather_object(pids, os.getpid(), group=ranks.control)
    return pids


def note_moves() -> list[Move]:
    """From now on, what this rank sends to whom, and in which stage of which step."""
    moves: list[Move] = []
    start = CollectiveTransport.start

    def noted(self: Any, tensor: torch.Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Any:
        row = tensor.nbytes // max(1, len(tensor))
        moves.append((*current_stage(), [row * count for count in send]))
        return start(self, tensor, send=send, receive=receive)

    CollectiveTransport.start = noted
    return moves


def _gathered(mine: list[Any], ranks: Ranks) -> list[list[Any]]:
    everybodys = [mine] * ranks.num_ranks
    if ranks.control is not None:
        dist.all_gather_object(everybodys, mine, group=ranks.control)
    return everybodys


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
