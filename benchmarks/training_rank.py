"""A rank that trains one recipe after the other, so that start-up and compiling are paid once.

training_rank.py PLAN, where PLAN is a JSON list of {"out": folder, "keys": [...], "copy_kernel": blocks or null,
"rows": how they are counted, or null}. With blocks, `comm.transport=collective` is a copy kernel of that many; what
`rows` does, every_occurrence.py says. `trained` in a folder says that its run is complete; before each run rank 0
decides whether there is still time, and the others read what it decided.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from freescale.app.run import train_run as commands
from freescale.comm.transports import registry as choose
from freescale.comm.world.launcher import RENDEZVOUS, as_rank
from freescale.recipe import Config, build_source, load_config
from freescale.train import loop
from freescale.train.quality.evaluate import Evaluator

SOURCES: dict[str, Any] = {}


class Silent:
    """Nobody watches these runs."""

    def write(self, event: dict[str, object]) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    """Train what the plan says, in its order, until its time is over."""
    # Writing a large table and ranking all its items take longer than these runs, and nobody reads what comes of it.
    loop.save = lambda run, step, *, best: None
    Evaluator.run = lambda self, *args, **options: {"hr@10": 0.0}  # type: ignore[method-assign]
    commands.build_source = build_source_once
    plan = json.loads(Path(sys.argv[1]).read_text())
    find_transport_kind = choose.find_transport_kind
    # Every run meets at a file of its own; one that an earlier start of the ranks has left would be taken for it.
    meeting = Path(sys.argv[1]).with_suffix(f".meet-{plan['start']}")
    first = os.environ["RANK"] == "0"
    for number, task in enumerate(plan["tasks"]):
        out = Path(task["out"])
        if not agreed(out.with_suffix(".begins"), first and time.time() < plan["deadline"], first):
            return
        os.environ[RENDEZVOUS] = f"file://{meeting}-{number}"
        if os.environ["WORLD_SIZE"] == "1":
            del os.environ[RENDEZVOUS]  # one rank alone, as without a launcher
        choose.find_transport_kind = find_transport_kind
        if task["copy_kernel"]:
            from copy_kernel import take_the_place_of_collective

            take_the_place_of_collective(task["copy_kernel"])
        began = time.monotonic()
        with counted_rows(task["rows"], out):
            commands.train_run(
                load_config(None, task["keys"]), resume="never", open_terminal=lambda total: Silent()
            )
        if first:
            part = out / "trained.part"
            part.write_text(f"{time.monotonic() - began:.1f}")
            part.rename(out / "trained")  # who looks for it finds it whole
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def counted_rows(rows: str | None, out: Path) -> AbstractContextManager[None]:
    """What counts the rows of a run, where its task says so."""
    if rows is None:
        return nullcontext()
    from every_occurrence import counted_owners

    return counted_owners(out.with_suffix(f".rank-{os.environ['RANK']}"), every=rows == "every")


def build_source_once(config: Config, **choices: Any) -> Any:
    """The data set of a recipe, made when first asked for: millions of items take longer than these runs."""
    key = repr((config.data.path, config.synthetic, config.run.seed))
    if key not in SOURCES:
        SOURCES[key] = build_source(config, **choices)
    return SOURCES[key]


def agreed(note: Path, yes: bool, first: bool) -> bool:
    """What rank 0 has decided."""
    if first:
        part = note.with_suffix(".part")
        part.write_text("yes" if yes else "no")
        part.rename(note)
    while not note.exists():
        time.sleep(0.01)
    return note.read_text() == "yes"


if __name__ == "__main__":
    as_rank(main)
