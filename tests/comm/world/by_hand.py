"""Ranks started by hand, as a scheduler of a cluster does: variables of torchrun, no launcher of ours."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.app.exit_codes import run_to_exit_code
from freescale.comm.world import free_port


@dataclass
class Rank:
    """A process, and what it has written."""

    process: Any
    output: Path

    def end(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Its exit code and what it said; kills it, with -999 for a code, when it does not end."""
        # Not `join`: a process it has forked may live on, and keep open what that looks at.
        if not until(lambda: self.process.exitcode is not None, timeout_s):
            self.process.kill()
            return -999, self.output.read_text()
        return self.process.exitcode, self.output.read_text()


class ByHand:
    """Starts ranks of one run.

    Args:
        folder: for what they write.
        variables: of the environment, further ones.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self.port = int(variables.get("MASTER_PORT", 0)) or free_port()
        self._folder, self._variables, self._started = folder, variables, []

    def start(self, work: Callable[[int], None], rank: int, num_ranks: int, **variables: str) -> Rank:
        """One more process."""
        output = self._folder / f"said-{len(self._started)}.txt"
        output.touch()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
            **self._variables,
            **variables,
        }
        process = multiprocessing.get_context("fork").Process(
            target=_main, args=(work, rank, environment, output)
        )
        process.start()
        self._started.append(process)
        return Rank(process, output)

    def all(self, work: Callable[[int], None], num_ranks: int) -> list[Rank]:
        """Every rank once."""
        return [self.start(work, rank, num_ranks) for rank in range(num_ranks)]

    def close(self) -> None:
        """None is left behind."""
        for process in self._started:
            if process.is_alive():
                process.kill()
            process.join()


def _main(work: Callable[[int], None], rank: int, environment: dict[str, str], output: Path) -> None:
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    run_to_exit_code(lambda: work(rank))
    sys.stdout.flush()
    os._exit(0)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
