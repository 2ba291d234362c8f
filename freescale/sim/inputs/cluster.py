"""What a cluster is made of: speeds, latencies, slowdowns and prices, each with the source of its number.

Presets lie in `presets/*.yaml`. A file of your own may give a number alone, or with its source; what it leaves out
comes from its `base` preset. All mistakes of a file are reported at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from freescale.errors import ConfigError, nearest
from freescale.sim.inputs.shipped import shipped_names, shipped_text
from freescale.strict_yaml import StrictLoader

_GIVEN = "given in the cluster file"
DEVICES = ("cpu", "cuda")
"""What ranks of a cluster compute on."""

Sourced = Mapping[str, tuple[float, str]]
"""Name of a number -> its value and source."""


def _number(
    help: str, *, above: float = 0.0, at_least: float | None = None, at_most: float = math.inf
) -> Any:
    """A number of a cluster: what it says, and its range (`above`: strictly; `at_least` allows the edge)."""
    return field(metadata={"help": help, "above": above, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One kind of node, and how nodes are connected. Rates are for one GPU and direction, in 10^9 bytes a second."""

    gpus_per_node: int = _number("GPUs that reach each other without the network", at_least=1)
    peak_tflops: float = _number("bf16 peak of a GPU; scales compute between kinds of GPUs")
    memory_tb_per_s: float = _number("memory rate of a GPU; scales what is bound by memory")
    nvlink_gb_per_s: float = _number("rate between GPUs of a node")
    nic_gb_per_s: float = _number("rate of one network adapter")
    nic_sharing: float = _number("GPUs that share an adapter", at_least=1)
    link_efficiency: float = _number("share of these rates that an exchange reaches", at_most=1)
    latency_us: float = _number("time of an empty exchange inside a node", at_least=0)
    node_latency_us: float = _number("added where it leaves the node", at_least=0)
    per_peer_us: float = _number("added for every other rank of an all-to-all", at_least=0)
    half_message_kb: float = _number(
        "message between two ranks of different nodes that reaches half of the rate, in 10^3 bytes",
        at_least=0,
    )
    gloo_message_us: float = _number("host time of one message of ids to a rank of another node", at_least=0)
    id_stages: float = _number(
        "2: ids go to one rank of every other node, which hands them on (comm.ids=two_stage); 1: to every rank",
        at_least=1,
        at_most=2,
    )
    inside_message_us: float = _number("host time of handing ids on to a rank of the same node", at_least=0)
    ids_exchange_us: float = _number("host time of an exchange in two stages beside its messages", at_least=0)
    ids_rank_us: float = _number("added to it for every rank whose ids it sorts out", at_least=0)
    sum_hop_us: float = _number("added to a sum for every doubling of the nodes", at_least=0)
    host_staged_gb_per_s: float = _number("rate of an SM-free exchange through host memory")
    sm_free_network: float = _number(
        "1: SM-free exchanges between nodes; 0: they go by kernels there, as no other way has run",
        at_least=0,
        at_most=1,
    )
    sm_kernel_slowdown: float = _number(
        "compute beside an exchange by kernels, times its time alone", at_least=1
    )
    sm_free_slowdown: float = _number(
        "compute beside an exchange by copy engines, times its time alone", at_least=1
    )
    price_per_gpu_hour: float = _number("dollars", at_least=0)
    name: str = "cluster"
    device: str = "cuda"
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def inter_gb_per_s(self) -> float:
        """What one GPU gets of the network."""
        return self.nic_gb_per_s / self.nic_sharing

    def assumed(self) -> list[str]:
        """Numbers that nobody measured or specified."""
        return [name for name in numbers() if self.sources.get(name, "").startswith("assumption")]


def numbers() -> dict[str, Mapping[str, Any]]:
    """Name -> range and help of every number of a cluster."""
    return {item.name: item.metadata for item in dataclasses.fields(Cluster) if "help" in item.metadata}


def preset_names() -> list[str]:
    """The clusters that ship."""
    return shipped_names("presets", ".yaml")


def load_cluster(name: str, *, measured: Sourced | None = None) -> Cluster:
    """A preset by its name, or a YAML file by its path.

    Args:
        name: of either.
        measured: takes the place of a preset's numbers, not of those that a file gives itself.

    Raises:
        ConfigError: there is no such preset or file, or the file has mistakes; all are listed.
    """
    if name.lower() in preset_names():
        preset = parse_cluster(shipped_text("presets", f"{name.lower()}.yaml"), where=f"preset {name}")
        return with_numbers(preset, measured or {})
    path = Path(name)
    if not path.suffix and not path.exists():
        close = nearest(name.lower(), preset_names())
        raise ConfigError(
            "there is no such cluster",
            got=name,
            allowed=f"{', '.join(preset_names())}, or a YAML file",
            next_step=f"--cluster {close}" if close else None,
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the cluster file cannot be read", got=f"{path}: {error}") from None
    return parse_cluster(text, where=str(path), measured=measured)


def with_numbers(cluster: Cluster, numbers: Sourced) -> Cluster:
    """The same with these in place of its own."""
    values: dict[str, Any] = {name: value for name, (value, _) in numbers.items()}
    sources = {name: source for name, (_, source) in numbers.items()}
    return dataclasses.replace(cluster, **values, sources={**cluster.sources, **sources})


def parse_cluster(text: str, *, where: str, measured: Sourced | None = None) -> Cluster:
    """A cluster from YAML text; `measured` as in `load_cluster`."""
    try:
        values = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("the cluster file is not valid YAML", got=f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("a cluster file is a mapping of names to numbers", got=f"{where}: {values!r}")
    problems: list[str] = []
    chosen, sources = _base(values.pop("base", None), problems, measured)
    title = values.pop("name", chosen.pop("name", "cluster"))
    device = values.pop("device", chosen.pop("device", "cuda"))
    if device not in DEVICES:
        problems.append(f"device: allowed: {', '.join(DEVICES)}; got {device!r}")
    for key, given in values.items():
        _place(str(key), given, chosen, sources, problems)
    missing = [name for name in numbers() if name not in chosen]
    if missing and not problems:
        problems.append(f"missing: {', '.join(missing)}; give them, or a base such as `base: h100`")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(
            f"{count} in the cluster file {where}:\n  - " + "\n  - ".join(problems),
            next_step="docs/simulate.md lists every number of a cluster",
        )
    return Cluster(**chosen, name=str(title), device=device, sources=sources)


def _base(
    name: object, problems: list[str], measured: Sourced | None
) -> tuple[dict[str, Any], dict[str, str]]:
    if name is None:
        return {}, {}
    if not isinstance(name, str) or name.lower() not in preset_names():
        problems.append(f"base: allowed: {', '.join(preset_names())}; got {name!r}")
        return {}, {}
    base = load_cluster(name, measured=measured)
    values = {key: getattr(base, key) for key in (*numbers(), "name", "device")}
    return values, dict(base.sources)


def _place(
    key: str, given: Any, chosen: dict[str, Any], sources: dict[str, str], problems: list[str]
) -> None:
    """Check one number and keep it with its source, or note the problem."""
    known = numbers()
    if key not in known:
        close = nearest(key, known)
        problems.append(
            f"{key}: unknown; " + (f"did you mean {close}?" if close else f"allowed: {', '.join(known)}")
        )
        return
    source = _GIVEN
    if isinstance(given, dict):
        extra = set(given) - {"value", "source"}
        if "value" not in given or extra:
            problems.append(f"{key}: a number, or {{value: ..., source: ...}}; got {given!r}")
            return
        source, given = str(given.get("source", _GIVEN)), given["value"]
    try:
        chosen[key] = checked_number(key, given)
        sources[key] = source
    except ValueError as error:
        problems.append(f"{key}: {error}")


def checked_number(key: str, given: object) -> float | int:
    """A number of a cluster in its range; ValueError with what is allowed otherwise."""
    limits = numbers()[key]
    if isinstance(given, str):
        try:
            given = float(given)  # YAML reads 1e3 as text
        except ValueError:
            raise ValueError(f"must be a number, got {given!r}") from None
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"must be a finite number, got {given!r}")
    if limits["at_least"] is not None and given < limits["at_least"]:
        raise ValueError(f"must be at least {limits['at_least']:g}, got {given:g}")
    if limits["at_least"] is None and given <= limits["above"]:
        raise ValueError(f"must be above {limits['above']:g}, got {given:g}")
    if given > limits["at_most"]:
        raise ValueError(f"must be at most {limits['at_most']:g}, got {given:g}")
    if key == "gpus_per_node":
        if given != int(given):
            raise ValueError(f"must be a whole number, got {given:g}")
        return int(given)
    return float(given)
