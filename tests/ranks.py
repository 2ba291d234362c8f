"""Run a function on several forked ranks; exceptions come back as text, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DTensor imports it on first use: 2 s in every forked rank, or once here
import torch.distributed as dist
import torch.distributed.checkpoint  # as does the first checkpoint of a rank

from tests.compiled_loops import load_compiled_loops

load_compiled_loops()  # half a second in every forked rank, or once here


def run_on_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """fn(rank, *args) on every rank of a gloo group; the list of results, or AssertionError with a rank's traceback."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(fn, rank, num_ranks, folder, send, args))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(pipes)
    waiting = dict(enumerate(pipes))
    failures = []
    while waiting and not failures:
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting)} did not finish within {timeout} s")
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                ok, value = False, f"rank {rank} died with exit code {processes[rank].exitcode}"
            if ok:
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        raise AssertionError("\n".join(failures))
    return results


def _rank_main(fn: Callable[..., Any], rank: int, num_ranks: int, folder: str, send: Any, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo"
    )
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
        result = fn(rank, *args)
        # By value: a pipe's own pickling shares the memory of tensors, which is gone when the rank has ended.
        send.send_bytes(pickle.dumps((True, result)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        send.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
        os._exit(1)
    send.close()
    os._exit(0)
