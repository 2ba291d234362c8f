"""Trainer: a run from a program, with an encoder, a head or a source of its own; the door to what the commands do.

    trainer = Trainer(encoder=GRU4Rec(64), source="data/ml-1m", recipe={"run.out": "runs/gru"})
    trainer.check()     # do my classes keep the one curve?
    trainer.fit()       # as `freescale train`: one process or torchrun, goes on where it stopped
    trainer.evaluate()
    trainer.export("export/gru")

It builds nothing itself. The recipe names the objects, `freescale.registry` knows them while a call lasts, and
`app/run/train_run.py` and `app/run/opened_run.py` do the rest, the same as for the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import nn

from freescale.app.program.own_objects import OwnObjects
from freescale.app.program.tables import Table, recipe_keys
from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.app.run.own_code import check_code
from freescale.app.run.resume_choice import on_change_of_data
from freescale.app.run.train_run import train_run
from freescale.app.unbroken_output import unbroken_output
from freescale.check import CheckReport, check_listeners
from freescale.comm.world import own_membership, pick_device
from freescale.data import SequenceSource
from freescale.errors import ConfigError, Preempted, TrainingError
from freescale.model import Encoder, Head
from freescale.recipe import Config, build_source, changed_keys, load_config, read_recipe
from freescale.train import Judge, MetricSink, TerminalSink

# Keys that mean something to an object; all others of the section describe kinds that a recipe makes.
_SAID_TO_OBJECTS = {"model": {"kind", "dim", "dtype"}, "head": {"kind", "num_negatives"}}
_FAMILIES = {"model": "encoder", "head": "head"}


class Trainer:
    """Trains any encoder and head on any source, with all that the commands have.

    Args:
        encoder: a module that is called as `Encoder` says, a function without arguments that makes one, or the name
            of a kind; the recipe's unless given. Objects are copied, never changed; a function is called after
            torch's seed was set from run.seed.
        head: what it is trained for, as `Head` says; the same ways.
        tables: `Table("item", dim=, rows=, map=, ...)`, and one for any other feature that has rows.
        source: a prepared folder, a raw file, histories as lists, or an object as `SequenceSource` says.
        recipe: a YAML file, or a mapping of `section.key`; everything that is a number or a name stands there.
        sinks: get every event of the run on rank 0, beside metrics.jsonl and the terminal.
        judge: may end the run at an evaluation.

    Examples:
        >>> Trainer(source=[[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], recipe={"run.out": "runs/first"}).fit()
    """

    def __init__(
        self,
        *,
        encoder: Encoder | Callable[[], nn.Module] | str | None = None,
        head: Head | Callable[[], Any] | str | None = None,
        tables: Sequence[Table] = (),
        source: SequenceSource | Sequence[Any] | str | Path | None = None,
        recipe: str | Path | Mapping[str, Any] | None = None,
        sinks: Sequence[MetricSink] = (),
        judge: Judge | None = None,
    ) -> None:
        self._objects = OwnObjects(encoder=encoder, head=head, source=source)
        self._sinks, self._judge = tuple(sinks), judge
        self._report: CheckReport | None = None
        self.config = self._read(recipe, {**self._objects.keys, **recipe_keys(tables)})

    def _read(self, recipe: str | Path | Mapping[str, Any] | None, keys: Mapping[str, Any]) -> Config:
        """The recipe, with what the arguments say."""
        sections = {} if recipe is None else read_recipe(recipe)
        for path, value in keys.items():
            section, _, key = path.partition(".")
            before = (sections.get(section) or {}).get(key, value)
            if before != value:
                raise ConfigError(
                    f"{path}: the recipe says one thing and an argument of the Trainer another",
                    got=f"{before!r} and {value!r}",
                    next_step="leave one of them out",
                )
            sections[section] = {**(sections.get(section) or {}), key: value}
        with self._objects.offered():
            config = load_config(sections)
        self._refuse_unheard(config)
        return config

    def _refuse_unheard(self, config: Config) -> None:
        """Keys that describe a kind a recipe makes, where there is an object instead."""
        for section, said in _SAID_TO_OBJECTS.items():
            name = self._objects.named.get(_FAMILIES[section])
            unheard = [key for key in changed_keys(getattr(config, section)) if key not in said]
            if name is not None and unheard:
                raise ConfigError(
                    f"{section}.{unheard[0]}: says nothing to an object",
                    got=f"{_FAMILIES[section]} {name}",
                    next_step="give it to the object, and leave the key out",
                )

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run.out)

    def check(self) -> CheckReport:
        """Try every rule of the one curve on the encoder, the head and the source, in seconds; print what it returns.

        `fit` stops where something was found, unless run.check=warn.
        """
        with self._objects.offered():
            # Whether a run that is there goes on with other input is for `fit` to say.
            keeps = on_change_of_data(self.run_dir, "auto", new_data=False) == "refuse"
            source = build_source(
                self.config, cache=self.run_dir / "data", on_change="keep" if keeps else "renew"
            )
            device = pick_device(self.config.run.device, local_rank=own_membership().local_rank or 0)
            report = check_code(self.config, source, device) + check_listeners(self._judge, self._sinks)
        self._report = report
        return report

    def fit(self, *, resume: str = "auto", new_data: bool = False, quiet: bool = False) -> dict[str, Any]:
        """Train to the end and return the summary, as `freescale train` does; under torchrun as one of its ranks.

        On SIGTERM it saves and ends the program with exit code 75, as the command does; run again, it goes on.

        Args:
            resume: "auto" goes on from the last checkpoint in run.out, "never" starts over; or a folder.
            new_data: go on from a checkpoint though it has learnt from other data.
            quiet: print nothing.
        """
        log_every = self.config.run.log_every

        def open_terminal(total: int) -> MetricSink:
            return _Silent() if quiet else TerminalSink(total_steps=total, log_every=log_every)

        try:
            with unbroken_output(), self._objects.offered():
                return train_run(
                    self.config,
                    resume=resume,
                    new_data=new_data,
                    open_terminal=open_terminal,
                    sinks=self._sinks,
                    judge=self._judge,
                    checked=self._report,
                    agreed=self._objects.first_weights(),
                )
        except Preempted as stop:
            if _is_first() and not quiet:
                Console(stderr=True).print(escape(str(stop)), highlight=False, soft_wrap=True)
            raise SystemExit(stop.exit_code) from stop

    def evaluate(self, *, cached: bool = False) -> dict[str, Any] | None:
        """Metrics of the best checkpoint on the test targets; rank 0 does it alone, other ranks get None."""
        if not _is_first():
            return None
        with self._objects.offered():
            return evaluate_run(self.run_dir, device=self.config.run.device, cached=cached)

    def export(self, out: str | Path) -> Path:
        """Write the best checkpoint into a new folder for `load_export`; rank 0 does it, others wait for it."""
        if _is_first():
            with self._objects.offered():
                export_run(self.run_dir, Path(out))
        else:
            _wait_for(Path(out) / "manifest.json", seconds=self.config.comm.timeout_s)
        return Path(out)


class _Silent:
    """Nowhere."""

    def write(self, event: dict[str, object]) -> None:
        pass

    def close(self) -> None:
        pass


def _wait_for(file: Path, *, seconds: float) -> None:
    """What rank 0 writes; if it fails, its launcher ends this rank, too."""
    until = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > until:
            raise TrainingError(
                f"rank 0 has not exported to this folder within {seconds:g} s, or this machine does not see it",
                got=file.parent,
                next_step="export to a folder that all machines share, or call export on rank 0 alone",
            )
        time.sleep(0.05)


def _is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
