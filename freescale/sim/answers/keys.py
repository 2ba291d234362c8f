"""Every number a prediction rests on, under one dotted name: for changes, sweeps and the sensitivity table."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

from freescale.errors import ConfigError, nearest
from freescale.sim.costs.plans import BALANCERS
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import checked_number, numbers, with_numbers
from freescale.sim.inputs.table_loads import FORM, read_tables
from freescale.sim.inputs.workload import Workload

_SETTING = {
    "setting.jitter": "relative spread of a step's compute on a rank when the same batch comes again",
    "setting.cost_error": "relative spread of batches about what the balancer expects of them",
    "setting.weights_share": "share of the backward that can be postponed, where no profile has timed it; 0: unknown",
    "setting.speed_spread": "relative spread of the speeds of ranks, for good; the balancer knows them",
    "setting.seed": "seed of lengths and jitter",
}
_FEATURES = {
    "features.balancer": f"one of {', '.join(BALANCERS)}",
    "features.prioritized": "true or false",
    "features.dedup": "true or false",
    "features.sm_free": "true or false; between nodes with cluster.sm_free_network=1 only",
    "features.even_owners": "true or false: the most popular rows dealt evenly to their owners",
    "features.postpone": "true or false: weight gradients beside rows that travel, where the profile has timed them",
    "features.node_dedup": "true or false: rows asked for once a node (comm.dedup=node); between full nodes only",
    "features.window": "steps planned together",
    "features.token_cap": "most tokens of a rank, in means",
}


OF_ONE_TABLE = ("table_rows", "row_bytes", "ids_per_token", "ids_per_sample", "negatives")
"""Numbers of the workload that speak of one table."""


def known_keys() -> dict[str, str]:
    """Key -> one line of help."""
    workload = {
        f"workload.{item.name}": item.metadata["help"]
        for item in dataclasses.fields(Workload)
        if "help" in item.metadata
    }
    cluster = {f"cluster.{name}": limits["help"] for name, limits in numbers().items()}
    texts = {
        "workload.lengths": "a distribution or a file",
        "workload.tables": f"several tables, instead of {', '.join(OF_ONE_TABLE)}: {FORM}",
    }
    return {**workload, **texts, **cluster, **_SETTING, **_FEATURES}


def value_of(setting: Setting, features: Features, key: str) -> Any:
    """What a key is now."""
    section, _, name = _checked(key).partition(".")
    if key in ("setting.jitter", "setting.cost_error"):
        return setting.jitter_now if key == "setting.jitter" else setting.cost_error_now
    owner = {"workload": setting.workload, "cluster": setting.cluster, "features": features}.get(
        section, setting
    )
    return getattr(owner, name)


def as_typed(value: object) -> str:
    """A value as it is given on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def changed(setting: Setting, features: Features, key: str, text: object) -> tuple[Setting, Features]:
    """The same with another value under one key.

    Raises:
        ConfigError: unknown key, or a value it cannot have.
    """
    section, _, name = _checked(key).partition(".")
    change: dict[str, Any]
    try:
        if section == "cluster":
            given = {name: (checked_number(name, text), "given")}
            return replace(setting, cluster=with_numbers(setting.cluster, given)), features
        if section == "workload":
            value = _workload_value(setting.workload, name, text)
            return replace(setting, workload=replace(setting.workload, **{name: value})), features
        if section == "setting":
            number = _number(text, at_least=0.0)
            change = {name: int(number) if name == "seed" else number}
            return replace(setting, **change), features
        return setting, replace(features, **{name: _feature_value(name, text)})
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def parse_change(text: str) -> tuple[str, str]:
    """`section.key=value` as a pair."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("a change looks like workload.samples_per_gpu=64", got=text)
    return _checked(key.strip()), value.strip()


def _checked(key: str) -> str:
    if key not in known_keys():
        close = _meant(key)
        raise ConfigError(
            f"{key} is no number of a prediction",
            allowed=None if close else ", ".join(_section(key).values()),
            next_step=f"did you mean {' or '.join(close)}?"
            if close
            else "`freescale simulate --keys` lists them with their defaults",
        )
    return key


def _meant(key: str) -> list[str]:
    """Keys of the section that have the word as one of theirs; otherwise the one that is spelt most alike."""
    words, word = _section(key), key.rpartition(".")[2]
    holding = [name for each, name in words.items() if word in each.split("_")]
    close = nearest(word, words)
    return holding or ([words[close]] if close else [])


def _section(key: str) -> dict[str, str]:
    """Words of the keys that may have been meant -> the keys: those of the section, of all if there is none such."""
    section = key.rpartition(".")[0]
    known = {name for name in known_keys() if name.partition(".")[0] == section} or known_keys()
    return {name.rpartition(".")[2]: name for name in known_keys() if name in known}


def _workload_value(workload: Workload, name: str, text: object) -> Any:
    if name == "lengths":
        return str(text)
    if name == "tables":
        read_tables(str(text))
        return str(text)
    if workload.tables and name in OF_ONE_TABLE:
        raise ValueError("workload.tables says it for every table; change it there, or set workload.tables=")
    item = next(item for item in dataclasses.fields(Workload) if item.name == name)
    number = _number(text, at_least=item.metadata["at_least"], at_most=item.metadata["at_most"])
    return int(number) if isinstance(item.default, int) else number


def _feature_value(name: str, text: object) -> Any:
    if name == "balancer":
        if text not in BALANCERS:
            raise ValueError(f"allowed: {', '.join(BALANCERS)}; got {text!r}")
        return text
    if name in ("window", "token_cap"):
        if name == "token_cap" and str(text).lower() in ("none", "null"):
            return None
        number = _number(text, at_least=1.0)
        return int(number) if name == "window" else number
    words = {"true": True, "false": False}
    if str(text).lower() not in words:
        raise ValueError(f"must be true or false, got {text!r}")
    return words[str(text).lower()]


def _number(text: object, *, at_least: float, at_most: float = math.inf) -> float:
    try:
        number = float(str(text).replace("_", ""))
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None
    if not (math.isfinite(number) and at_least <= number <= at_most):
        limits = f"at least {at_least:g}" + (f" and at most {at_most:g}" if math.isfinite(at_most) else "")
        raise ValueError(f"must be {limits}, got {text!r}")
    return number
