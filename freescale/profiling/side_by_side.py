"""Ranks measured side by side: on cores or on one GPU that they share, each as slow as its neighbours make it.

The launcher writes what is to be measured into a folder and starts the ranks; each leaves what it has measured there
(`python -m freescale.profiling.side_by_side FOLDER`). Ranks that run already measure and tell each other. Steps of all
ranks make one fit; host and links are theirs together.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from freescale.balance import MeasuredStep
from freescale.comm.transports import make_transport
from freescale.comm.world import Ranks, as_rank, device_name, gather, join_ranks, launch
from freescale.profiling.exchange_times import measure_links
from freescale.profiling.hiding_cost import measure_hiding
from freescale.profiling.loop_times import measure_loop
from freescale.profiling.step_times import StepTimes, measure_steps
from freescale.recipe import Config, build_features, build_source, load_config, sample_work
from freescale.sim import Timing


@dataclass(frozen=True)
class InARun:
    """Forward and backward of all ranks while they train together; nothing of models with segments.

    Args:
        plain: one stage after the other.
        hiding: the same steps while embedding traffic is hidden.
        shortest: steps of one sample a rank.
    """

    plain: list[MeasuredStep] = field(default_factory=list)
    hiding: list[MeasuredStep] = field(default_factory=list)
    shortest: list[MeasuredStep] = field(default_factory=list)


@dataclass(frozen=True)
class SideBySide:
    """What ranks measured at the same time.

    Args:
        hardware: its name.
        steps: of all ranks.
        in_a_run: the same in short runs.
        lines: the times "host", "row_work" and "exchanges" of those runs, each with and without "_hiding".
        rates: of their exchanges; on two CPU ranks also what hiding costs their cores.
    """

    hardware: str
    steps: StepTimes
    in_a_run: InARun
    lines: dict[str, Timing]
    rates: dict[str, float]


def measure_side_by_side(
    config: Config,
    *,
    num_ranks: int,
    environment: Mapping[str, str],
    seconds: float,
    most_samples: int,
) -> SideBySide:
    """Let ranks that share a machine measure all there is, and put together what they found.

    Args:
        config: the recipe, with the device of the ranks.
        num_ranks: that share it.
        environment: what lets them share it.
        seconds: for the steps.
        most_samples: samples of the largest batch of a rank.
    """
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(config.to_yaml())
        (folder / "plan.json").write_text(json.dumps({"seconds": seconds, "most_samples": most_samples}))
        launch([name], num_ranks=num_ranks, environment=environment, program=("-m", __name__))
        found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    return _put_together(found)


def measure_these(config: Config, ranks: Ranks, *, seconds: float, most_samples: int) -> SideBySide:
    """The same by ranks that run already; every one of them must call it."""
    assert ranks.control is not None
    with tempfile.TemporaryDirectory(prefix="freescale-profile-") as name:
        mine = _measure(config, ranks, Path(name), seconds=seconds, most_samples=most_samples)
    texts = gather(json.dumps(mine), group=ranks.control)
    return _put_together([json.loads(text) for text in texts])


def _put_together(found: Sequence[Mapping[str, Any]]) -> SideBySide:
    first = found[0]
    kept = ("dense_parameters", "row_bytes", "tables")
    steps = StepTimes(**{name: first[name] for name in kept})
    for one in found:
        for part, measured in one["steps"].items():
            steps.steps[part] += [MeasuredStep(*step) for step in measured]
        steps.singles += [MeasuredStep(*step) for step in one["singles"]]
        steps.same += [MeasuredStep(*step) for step in one["same"]]
        steps.longest = max(steps.longest, one["longest"])
        steps.num_postponed += one["num_postponed"]
        steps.num_without_room += one["num_without_room"]
    lines = {name: Timing(**line) for name, line in first["lines"].items()}
    in_a_run = {
        name: [MeasuredStep(*step) for one in found for step in one["in_a_run"][name]]
        for name in first["in_a_run"]
    }
    return SideBySide(first["hardware"], steps, InARun(**in_a_run), lines, first["rates"])


def _measure(
    config: Config, ranks: Ranks, folder: Path, *, seconds: float, most_samples: int
) -> dict[str, Any]:
    """Everybody measures the same at the same time, on batches of its own."""
    assert ranks.group is not None
    features = build_features(config, build_source(config))
    mine = replace(config, run=replace(config.run, seed=config.run.seed + ranks.rank))
    steps = measure_steps(mine, ranks.device, seconds=seconds, most_samples=most_samples)
    ranks.barrier()
    transport = make_transport(ranks.group, device=ranks.device, kind=config.comm.transport)
    rates = measure_links(transport, ranks.device)
    if ranks.device.type == "cpu" and ranks.num_ranks == 2:
        rates |= measure_hiding(ranks.rank, ranks.group)
    plain, hiding = (
        measure_loop(config, ranks, most_samples=most_samples, hiding=hides, folder=folder / str(hides))
        for hides in (False, True)
    )
    lines = {
        f"{name}{ending}": asdict(getattr(loop, name))
        for name in ("host", "row_work", "exchanges")
        for ending, loop in (("", plain), ("_hiding", hiding))
    }
    in_a_run = InARun(plain.steps, hiding.steps, plain.shortest)
    return {
        "hardware": device_name(ranks.device),
        "steps": steps.steps,
        "singles": steps.singles,
        "same": steps.same,
        "longest": steps.longest,
        "dense_parameters": steps.dense_parameters,
        "row_bytes": steps.row_bytes,
        "tables": steps.tables,
        "num_postponed": steps.num_postponed,
        "num_without_room": steps.num_without_room,
        # A run counts the tokens and pairs that segments leave and features add; parts measured alone count those
        # of whole histories.
        "in_a_run": asdict(in_a_run if sample_work(config, features).is_whole else InARun()),
        "lines": lines,
        "rates": rates,
    }


def _rank(folder: Path) -> None:
    """One of the ranks that were started to be measured."""
    config = load_config(folder / "config.yaml", [])
    plan = json.loads((folder / "plan.json").read_text())
    with join_ranks(device=config.run.device) as ranks:
        found = _measure(config, ranks, folder, seconds=plan["seconds"], most_samples=plan["most_samples"])
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
        ranks.barrier()


if __name__ == "__main__":
    as_rank(lambda: _rank(Path(sys.argv[1])))
