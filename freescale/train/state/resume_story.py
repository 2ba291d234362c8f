"""What a resumed run says first: from where it goes on, how old that is, and what has changed since."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from freescale import units
from freescale.comm.world import device_name
from freescale.train.run import Run
from freescale.train.state.same_data import data_changes
from freescale.version import __version__


@dataclass(frozen=True)
class ResumeStory:
    """Where a run goes on.

    Args:
        path: the checkpoint.
        step: steps behind it.
        written: when it was written, in seconds since 1970; None: it does not say.
        num_ranks: who wrote it.
        changes: what is different now.
    """

    path: Path
    step: int
    written: float | None
    num_ranks: int
    changes: tuple[str, ...]

    def facts(self) -> dict[str, object]:
        """For the log."""
        return {"path": str(self.path), "written": self.written, "changes": list(self.changes)}

    def __str__(self) -> str:
        age = None if self.written is None else max(0.0, time.time() - self.written)
        ago = "" if age is None else f"{units.long_duration(age)} ago "
        since = f"now {', '.join(self.changes)}" if self.changes else "nothing has changed since"
        run = self.path.parent.parent
        return f"resuming {run} from step {self.step} (written {ago}on {_ranks(self.num_ranks)}; {since})"


def resume_story(run: Run, path: Path, meta: Mapping[str, Any]) -> ResumeStory:
    """The story of a checkpoint of these facts, for this run."""
    changes = [] if meta["num_ranks"] == run.ranks.num_ranks else [_ranks(run.ranks.num_ranks)]
    changes += _changed_keys(meta["recipe"], run.state.recipe)
    now = {**facts_of_place(run), "freescale": __version__, "torch": torch.__version__}
    changes += [
        f"{name} {_shown(meta[name])} -> {_shown(now[name])}"
        for name in now
        if meta.get(name, now[name]) != now[name]
    ]
    changes += [f"other data: {change}" for change in data_changes(meta, run.state.data)]
    if "data" not in meta:
        changes.append("its data not compared: it does not say which they were")
    return ResumeStory(path, int(meta["step"]), meta.get("written"), int(meta["num_ranks"]), tuple(changes))


def facts_of_place(run: Run) -> dict[str, Any]:
    """Where a run runs; a checkpoint keeps it."""
    device = run.ranks.device
    # Not how many threads a rank has: that follows from their number.
    kind = device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {"hosts": sorted(set(run.state.hosts)), "device": kind}


def _changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    now = json.loads(json.dumps(now))  # a checkpoint has no tuples
    return [
        f"{section}.{key} {_shown(then[section][key])} -> {_shown(value)}"
        for section, keys in now.items()
        for key, value in keys.items()
        if key in then.get(section, {}) and then[section][key] != value
    ]


def _shown(value: Any) -> str:
    """As a recipe has it."""
    return ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value).strip('"')


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
