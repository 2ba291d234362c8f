"""Code from outside in a run: which parts it is, whether it keeps the one curve, and what the run's folder says."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale import registry
from freescale.check import CheckReport, check_model, check_source_rules, judge_report
from freescale.comm.world import Ranks, from_first
from freescale.data import SequenceSource, source_kind
from freescale.recipe import Config, build_examples, build_model, item_content
from freescale.registry import Kind

OWN_CODE_FILE = "own_code.json"


@dataclass(frozen=True)
class OwnCode:
    """What a run has of code from outside.

    Args:
        parts: family -> name and class, with a digest of the class's source where Python knows it.
        report: what the check found.
        told: what whoever started the run must know.
    """

    parts: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    report: CheckReport = field(default_factory=CheckReport)
    told: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """As a run's folder keeps it."""
        return {**{family: dict(part) for family, part in self.parts.items()}, **self.report.facts()}


def own_kinds(config: Config) -> dict[str, Kind]:
    """The parts of a run that decide its curve and come from outside, by family."""
    kinds = {
        "encoder": registry.find("encoder", config.model.kind),
        "head": registry.find("head", config.head.kind),
        "source": source_kind(config.data.path, config.data.source),
    }
    return {family: kind for family, kind in kinds.items() if not kind.ships}


def check_code(config: Config, source: SequenceSource, device: torch.device) -> CheckReport:
    """Every rule about encoder, head and source, tried in this process."""
    head = build_model(config, source, content=item_content(config, source)).head
    examples = build_examples(config, source, "train", negatives=head.needs.negatives)

    def make_model() -> Any:
        return build_model(config, source, content=item_content(config, source))

    return check_model(make_model, examples, dim=config.model.dim, device=device) + check_source_rules(source)


def check_own_code(
    config: Config, source: SequenceSource, ranks: Ranks, *, done: CheckReport | None = None
) -> OwnCode:
    """Where a run has code from outside: check it on rank 0, unless that was done before.

    Raises:
        ConfigError: it leaves the one curve, and the recipe does not say `run.check=warn`.
    """
    kinds = own_kinds(config)
    if not kinds:
        return OwnCode()
    out = Path(config.run.out)

    def find() -> OwnCode:
        report = check_code(config, source, ranks.device) if done is None else done
        told = judge_report(report, on_violation=config.run.check)
        parts = {family: describe_kind(kind, source) for family, kind in kinds.items()}
        return OwnCode(parts, report, (*told, *_changed(out, parts)))

    return from_first(find, ranks=ranks, what="check code from outside")


def describe_kind(kind: Kind, source: SequenceSource | None = None) -> dict[str, str | None]:
    """Name and class of a kind, and a digest of the source of that class."""
    made = getattr(kind.make, "made", kind.make)
    if kind.family == "source" and kind.name.startswith(registry.PYTHON):
        made = type(source)
    text: str | None
    try:
        text = hashlib.blake2b(inspect.getsource(made).encode(), digest_size=8).hexdigest()
    except (OSError, TypeError):  # typed into an interpreter, or compiled
        text = None
    return {"kind": kind.name, "class": f"{made.__module__}.{made.__qualname__}", "source": text}


def read_own_code(run_dir: Path) -> dict[str, Any]:
    """What a run's folder keeps of code from outside; nothing where there is none."""
    try:
        kept: dict[str, Any] = json.loads((run_dir / OWN_CODE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return kept


def write_own_code(run_dir: Path, code: OwnCode) -> None:
    """Keep it in the run's folder; nothing is written where all code is ours."""
    path = run_dir / OWN_CODE_FILE
    if code.parts:
        path.write_text(json.dumps(code.facts(), indent=1) + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def _changed(out: Path, parts: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Sources that are not what they were when the run began."""
    before = read_own_code(out)
    return [
        f"the source of {family} {part['kind']} is not what it was when this run began: it goes on with the new one"
        for family, part in parts.items()
        if part["source"] and before.get(family, {}).get("source") not in (None, part["source"])
    ]
