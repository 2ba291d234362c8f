"""The recipe of a run: strict sections, read from YAML, changed by `key=value`, all mistakes reported at once."""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from freescale.errors import ConfigError, nearest
from freescale.recipe.sections import (
    Config,
    EmbeddingSection,
    ItemsSection,
    ModelSection,
    MoeSection,
    SegmentsSection,
    as_yaml,
)
from freescale.strict_yaml import StrictLoader

# Ids of two batches go ahead of the current one, and gradients of the one before it may still be on their way.
_BATCHES_UNDER_WAY = 3

__all__ = ["Config", "describe_keys", "free_keys", "load_config"]


def load_config(recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe (or start from the defaults), apply `section.key=value` overrides, check everything.

    Raises:
        ConfigError: lists every unknown key and bad value at once, each with its dotted path.
    """
    values = _read_yaml(Path(recipe)) if recipe is not None else {}
    problems: list[str] = []
    sections: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    flat = dict(_flatten(values, sections, problems))
    flat.update(_parse_overrides(overrides, problems))
    chosen: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for path, value in flat.items():
        _place(path, value, sections, chosen, problems)
    if not problems:
        config = Config(**{name: make(**chosen[name]) for name, make in sections.items()})
        problems = _cross_checks(config)
    if problems:
        places = [str(recipe)] if recipe else []
        if overrides:
            places.append("the keys given with it" if recipe else "the overrides")
        where = "in " + (" and ".join(places) or "the defaults")
        raise ConfigError(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} {where}:\n  - "
            + "\n  - ".join(problems),
            next_step="`freescale keys` lists every recipe key with its default",
        )
    return config


def describe_keys() -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, help) of every recipe key, in recipe order."""
    for section in dataclasses.fields(Config):
        section_type: Any = section.default_factory
        hints = typing.get_type_hints(section_type)
        for item in dataclasses.fields(section_type):
            default = yaml.safe_dump(as_yaml(item.default), default_flow_style=True).splitlines()[0]
            yield f"{section.name}.{item.name}", _type_name(hints[item.name]), default, item.metadata["help"]


@dataclass(frozen=True)
class _Override:
    """A value from the command line, as it was typed and as YAML reads it."""

    text: str
    value: Any


def free_keys() -> set[str]:
    """Keys that may differ between two parts of one run."""
    return {
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
        if item.metadata["free"]
    }


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the recipe does not exist", got=path, next_step="`ls recipes/` lists those that ship"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the recipe cannot be read", got=f"{path}: {error}", next_step=_instead_of_a_recipe(path)
        ) from None
    try:
        values = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            "the recipe is not valid YAML", got=f"{path}: {error}", next_step=_instead_of_a_recipe(path)
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            "a recipe is a mapping of sections",
            got=f"{path} holds {'text' if isinstance(values, str) else f'a {type(values).__name__}'}",
            next_step=_instead_of_a_recipe(path),
        )
    return values


def _instead_of_a_recipe(path: Path) -> str | None:
    """What was probably meant by a path that is no recipe: a data set, a run, a file of raw data."""
    if (path / "config.yaml").is_file():
        return f"did you mean {path / 'config.yaml'}?"
    if path.suffix.lower() in (".yaml", ".yml"):
        return None
    return f"a recipe is a YAML file; did you mean data.path={path}?"


def _flatten(
    values: Mapping[Any, Any], sections: Mapping[str, Any], problems: list[str]
) -> Iterator[tuple[str, Any]]:
    for name, body in values.items():
        if name not in sections:
            problems.append(_unknown(str(name), sections, kind="section"))
        elif not isinstance(body, dict | None):
            problems.append(f"{name}: a section is a mapping of keys, got {body!r}")
        elif body is not None:
            for key, value in body.items():
                yield f"{name}.{key}", value


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for text in overrides:
        path, equals, raw = text.partition("=")
        if not equals or "." not in path:
            problems.append(f"{text!r}: an override looks like section.key=value, e.g. run.steps=200")
            continue
        try:
            yield path.strip(), _Override(raw.strip(), yaml.safe_load(raw) if raw.strip() else "")
        except (yaml.YAMLError, ValueError):
            problems.append(f"{path}: cannot read the value {raw!r}")


def _place(
    path: str, value: Any, sections: Mapping[str, Any], chosen: dict[str, dict[str, Any]], problems: list[str]
) -> None:
    """Check one value and put it into its section, or note the problem."""
    section, _, key = path.partition(".")
    if section not in sections:
        problems.append(_unknown(section, sections, kind="section"))
        return
    fields = {item.name: item for item in dataclasses.fields(sections[section])}
    if key not in fields:
        problems.append(_unknown(key, fields, kind="key", prefix=f"{section}."))
        return
    hint = typing.get_type_hints(sections[section])[key]
    if isinstance(value, _Override):
        # A folder called 2024-05-06 or 007 keeps its name.
        is_number = isinstance(value.value, int | float | datetime.date) and not isinstance(value.value, bool)
        value = value.text if hint is str and is_number else value.value
    try:
        checked = _convert(value, hint)
        _check_range(checked, fields[key].metadata)
    except ValueError as error:
        problems.append(f"{path}: {error}")
        return
    chosen[section][key] = checked


def _unknown(name: str, names: Mapping[str, Any], *, kind: str, prefix: str = "") -> str:
    close = nearest(name, names)
    hint = f"did you mean {prefix}{close}?" if close else f"allowed: {', '.join(names)}"
    return f"{prefix}{name}: unknown {kind}; {hint}"


def _convert(value: Any, hint: Any) -> Any:
    """The value as the annotated type; ValueError with what is allowed otherwise."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(value, inner)
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            close = nearest(str(value), options)
            hint_text = f" (did you mean {close}?)" if close else ""
            raise ValueError(f"allowed: {', '.join(options)}; got {value!r}{hint_text}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_convert(item, typing.get_args(hint)[0]) for item in items)
    return _convert_scalar(value, hint)


def _convert_scalar(value: Any, hint: type) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        # YAML reads 1e-3 as text; people write it all the time.
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            return number
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    raise ValueError(f"must be {names[hint]}, got {value!r}")


def _check_range(value: Any, limits: Mapping[str, Any]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if limits["at_least"] is not None and value < limits["at_least"]:
        raise ValueError(f"must be at least {limits['at_least']}, got {value}")
    if limits["at_most"] is not None and value > limits["at_most"]:
        raise ValueError(f"must be at most {limits['at_most']}, got {value}")


def _cross_checks(config: Config) -> list[str]:
    """Problems that only show when several keys are seen together."""
    problems = []
    if not config.run.out.strip():
        problems.append("run.out: must name a folder, got nothing")
    if config.model.dim % config.model.heads:
        problems.append(f"model.heads: must divide model.dim = {config.model.dim}, got {config.model.heads}")
    problems += _segment_problems(config) + _decoder_problems(config.model) + _item_problems(config)
    if config.embedding.id_map == "hash" and config.embedding.rows is None:
        problems.append("embedding.rows: required when embedding.id_map=hash")
    problems += _id_map_problems(config)
    problems += _ffn_problems(config)
    if config.head.kind == "retrieval" and config.eval.metric == "auc":
        problems.append("eval.metric: auc belongs to head.kind=ranking")
    if config.head.kind == "ranking" and config.eval.metric != "auc":
        problems.append(f"eval.metric: head.kind=ranking is judged by auc, got {config.eval.metric}")
    if config.head.kind == "ranking" and not config.head.label_thresholds:
        problems.append("head.label_thresholds: a ranking head needs at least one")
    return problems


def _segment_problems(config: Config) -> list[str]:
    """Segments that would never be made, or keys of segments without them."""
    options, defaults = config.segments, SegmentsSection()
    if options.recent is None:
        return [
            f"segments.{name}: does nothing without segments.recent"
            for name in ("length", "summaries")
            if getattr(options, name) != getattr(defaults, name)
        ]
    if options.recent >= config.data.max_length:
        return [
            f"segments.recent: must be below data.max_length = {config.data.max_length}, or there is no history to "
            f"compress; got {options.recent}"
        ]
    return []


def _decoder_problems(options: ModelSection) -> list[str]:
    """Keys of the decoder that do nothing, or do not fit its heads."""
    if options.kind != "llama":
        defaults = ModelSection()
        return [
            f"model.{name}: only for model.kind=llama"
            for name in ("kv_heads", "ffn_dim", "rope_base")
            if getattr(options, name) != getattr(defaults, name)
        ]
    problems = []
    if options.heads % (options.kv_heads or options.heads):
        problems.append(f"model.kv_heads: must divide model.heads = {options.heads}, got {options.kv_heads}")
    if options.dim // options.heads % 2:
        problems.append(
            f"model.heads: rotary positions need heads of even width, got {options.dim} / {options.heads}"
        )
    return problems


def _item_problems(config: Config) -> list[str]:
    """Keys of item encoders that do nothing, or do not fit each other."""
    options, defaults = config.items, ItemsSection()
    of_text = ("vocabulary", "min_count", "max_tokens", "dim", "layers", "heads", "dropout")
    kinds = {"file": "content or text", "add_ids": "content or text", "chunk": "content or text"}
    unused = {"ids": (*kinds, *of_text), "content": of_text, "text": ()}[options.kind]
    problems = [
        f"items.{name}: only for items.kind={kinds.get(name, 'text')}"
        for name in unused
        if getattr(options, name) != getattr(defaults, name)
    ]
    if options.kind == "text" and (options.dim % options.heads or options.dim // options.heads % 2):
        problems.append(
            f"items.heads: items.dim / items.heads must be an even whole number, got {options.heads}"
        )
    if options.kind != "ids" and not options.add_ids and config.embedding != EmbeddingSection():
        problems.append("embedding: without items.add_ids there is no table to set up")
    return problems


def _id_map_problems(config: Config) -> list[str]:
    """Keys of the zero-collision map that do nothing, or miss each other."""
    options, problems = config.embedding, []
    if options.id_map != "zero_collision":
        defaults = EmbeddingSection()
        problems += [
            f"embedding.{name}: only for embedding.id_map=zero_collision"
            for name in ("max_probe", "buckets", "eviction", "ttl", "admit_after", "admission", "guard")
            if getattr(options, name) != getattr(defaults, name)
        ]
    elif (options.eviction == "ttl") != (options.ttl is not None):
        problems.append("embedding.ttl: goes with embedding.eviction=ttl, both or none")
    if config.pipeline.prioritized and options.guard < _BATCHES_UNDER_WAY:
        problems.append(
            f"embedding.guard: pipeline.prioritized has {_BATCHES_UNDER_WAY} batches under way, got {options.guard}; "
            "raise it, or set pipeline.prioritized=false"
        )
    return problems


def _ffn_problems(config: Config) -> list[str]:
    """Keys of the feed-forward part that do nothing, or cannot work."""
    problems = []
    if config.ffn.kind != "moe" and config.moe != MoeSection():
        changed = [item.name for item in dataclasses.fields(MoeSection)]
        changed = [name for name in changed if getattr(config.moe, name) != getattr(MoeSection(), name)]
        problems += [f"moe.{name}: only for ffn.kind=moe" for name in changed]
    if config.ffn.kind == "none":
        return problems
    if config.model.kind == "sasrec":
        problems.append("ffn.kind: model.kind=sasrec has a feed-forward part of its own")
    if config.model.ffn_dim is not None:
        problems.append("model.ffn_dim: ffn.kind puts another part in its place; set ffn.hidden")
    if config.ffn.kind == "moe" and config.moe.top_k > config.moe.experts:
        problems.append(f"moe.top_k: at most moe.experts = {config.moe.experts}, got {config.moe.top_k}")
    if config.ffn.kind == "moe" and config.moe.top_k == 1 and config.moe.renormalize:
        problems.append(
            "moe.renormalize: with moe.top_k=1 every weight would be 1 and the router could not learn; set it false"
        )
    return problems


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " | ".join(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if arg is type(None) else _type_name(arg) for arg in typing.get_args(hint))
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    return hint.__name__
