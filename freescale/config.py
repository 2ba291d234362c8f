"""The recipe of a run: strict sections, read from YAML, changed by `key=value`, all mistakes reported at once."""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from freescale.errors import ConfigError, nearest


def _key(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    free: bool = False,
) -> Any:
    """A recipe key: its default, one line of help, its range, and whether it may change within one run.

    Free keys move work or files, never the curve; a resumed run may come with others.
    """
    return field(
        default=default, metadata={"help": help, "at_least": at_least, "at_most": at_most, "free": free}
    )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives and how long it goes on."""

    out: str = _key("runs/latest", "folder for config, metrics, checkpoints and the report", free=True)
    steps: int | None = _key(
        None, "length of the run in steps; null: run.epochs decides", at_least=1, free=True
    )
    epochs: float = _key(10.0, "passes over the data when run.steps is null", at_least=0.001, free=True)
    seed: int = _key(
        1, "seed of batches, negatives, initial weights and dropout", at_least=0, at_most=2**63 - 1
    )
    log_every: int = _key(20, "steps between two log lines", at_least=1, free=True)
    eval_every: int | None = _key(
        None, "steps between evaluations; null: once an epoch", at_least=1, free=True
    )
    checkpoint_every: int | None = _key(
        None, "steps between checkpoints; null: at every evaluation", at_least=1, free=True
    )
    keep: int = _key(2, "number of latest checkpoints to keep, besides the best", at_least=1, free=True)
    patience: int | None = _key(
        None, "stop after this many evaluations without a better one", at_least=1, free=True
    )
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where to compute", free=True)
    tensorboard: bool = _key(False, "also write TensorBoard files to RUN_DIR/tensorboard", free=True)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The histories and how a global batch is drawn from them."""

    path: str = _key(
        "synthetic", "'synthetic', a prepared folder, or a raw file to prepare on the way", free=True
    )
    global_batch: int = _key(128, "samples a step, over all ranks", at_least=1)
    global_tokens: int | None = _key(
        None, "tokens a step over all ranks, instead of global_batch", at_least=1
    )
    max_length: int = _key(200, "keep this many latest events of a history", at_least=1)
    shuffle_rows: int = _key(
        100_000, "histories shuffled together; bounds the memory of the reader", at_least=1
    )
    cache_mb: int = _key(256, "memory a process keeps recently read row groups in", at_least=1, free=True)
    workers: int = _key(0, "loader processes a rank; 0 loads in the training process", at_least=0, free=True)
    use_time: bool = _key(True, "use time stamps where the data has them")


@dataclass(frozen=True, kw_only=True)
class SyntheticSection:
    """The embedded data set: long-tailed lengths, Zipf ids, a planted preference."""

    users: int = _key(3000, "number of histories", at_least=1)
    items: int = _key(1500, "number of items", at_least=10)
    mean_length: float = _key(30.0, "mean events a history", at_least=3)
    sigma: float = _key(1.0, "spread of the log-normal lengths", at_least=0, at_most=3)
    max_length: int = _key(400, "longest history", at_least=4)
    zipf: float = _key(1.0, "exponent of the item popularity", at_least=0)
    preference: float = _key(
        0.8, "share of events that follow the user's planted taste", at_least=0, at_most=1
    )


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The sequence encoder."""

    kind: Literal["hstu", "sasrec"] = _key("hstu", "encoder")
    dim: int = _key(64, "width of item vectors and layers", at_least=2)
    layers: int = _key(2, "number of layers", at_least=1)
    heads: int = _key(1, "attention heads; dim must be a multiple", at_least=1)
    dropout: float = _key(0.2, "dropout inside layers and on the input", at_least=0, at_most=0.95)
    dtype: Literal["float32", "bfloat16", "float64"] = _key(
        "float32", "float32; bfloat16 = autocast on GPU; float64 = everything, tables included"
    )
    position_bias: bool = _key(True, "HSTU: relative position bias")
    time_bias: bool = _key(True, "HSTU: relative time bias, where the data has time stamps")


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """What the model is trained to predict."""

    kind: Literal["retrieval", "ranking"] = _key(
        "retrieval", "next item by sampled softmax, or actions as labels"
    )
    num_negatives: int = _key(128, "negatives drawn for each sample", at_least=1)
    temperature: float = _key(0.05, "divides the logits of the sampled softmax", at_least=1e-4)
    normalize: bool = _key(True, "l2-normalise user and item vectors")
    label_thresholds: tuple[float, ...] = _key(
        (3.5,), "ranking: one binary task a threshold, label = action > threshold"
    )


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """The item table and its own optimizer."""

    id_map: Literal["direct", "hash"] = _key("direct", "how raw ids become rows")
    rows: int | None = _key(None, "table rows; null: largest id + 1 (required for id_map=hash)", at_least=1)
    optimizer: Literal["sgd", "rowwise_adagrad", "adam"] = _key("adam", "sparse optimizer of the table")
    lr: float = _key(1e-3, "learning rate of the table, follows optim.schedule", at_least=0)
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "storage type of the table (float64 with model.dtype)"
    )
    beta2: float = _key(0.98, "adam: decay of the second moment", at_least=0, at_most=0.999999)
    eps: float = _key(1e-8, "adam, adagrad: added to the denominator", at_least=1e-30)
    replicate_below_mb: float = _key(
        0.0, "replicate tables smaller than this on every rank", at_least=0, free=True
    )


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """AdamW for the dense parameters."""

    lr: float = _key(1e-3, "learning rate", at_least=0)
    weight_decay: float = _key(0.0, "AdamW weight decay", at_least=0)
    beta1: float = _key(0.9, "decay of the first moment", at_least=0, at_most=0.999999)
    beta2: float = _key(0.98, "decay of the second moment", at_least=0, at_most=0.999999)
    schedule: Literal["constant", "cosine"] = _key("constant", "shape of the learning rate after warm-up")
    warmup_steps: int = _key(0, "steps of linear warm-up", at_least=0)
    clip_norm: float | None = _key(None, "clip the global norm of the dense gradients", at_least=0)
    accumulate: int = _key(
        1, "micro-batches a step (less activation memory, same curve)", at_least=1, free=True
    )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Leave-one-out evaluation by full ranking."""

    metric: Literal["hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "ndcg@200", "mrr", "auc"] = _key(
        "ndcg@10", "what decides the best checkpoint and early stopping"
    )
    batch: int = _key(256, "histories evaluated at once on a rank", at_least=1, free=True)
    max_users: int | None = _key(
        None, "evaluate during training on the first N users only", at_least=1, free=True
    )
    item_chunk: int = _key(
        65_536, "items scored at once; bounds memory for large catalogues", at_least=1, free=True
    )


@dataclass(frozen=True, kw_only=True)
class BalanceSection:
    """Which rank computes which sample."""

    enabled: bool = _key(True, "balance predicted cost over the ranks", free=True)
    max_tokens_ratio: float = _key(1.10, "cap on a rank's tokens, times the mean", at_least=1, free=True)
    window: int = _key(1, "steps planned together", at_least=1)
    cost_model: str | None = _key(
        None, "JSON file of a measured cost model, e.g. RUN_DIR/cost_model.json of an earlier run", free=True
    )
    refit_every: int | None = _key(
        50,
        "steps between agreements on measured costs and rank speeds; null: keep the defaults",
        at_least=1,
        free=True,
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How the stages of a batch overlap."""

    prioritized: bool = _key(False, "hide embedding traffic under compute", free=True)


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """How ranks talk."""

    transport: Literal["auto", "collective"] = _key("auto", "route of the embedding exchange", free=True)
    timeout_s: float = _key(600.0, "a collective that takes longer ends the run", at_least=1, free=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe. Every key has a default: `Config()` trains HSTU on the embedded data."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    synthetic: SyntheticSection = field(default_factory=SyntheticSection)
    model: ModelSection = field(default_factory=ModelSection)
    head: HeadSection = field(default_factory=HeadSection)
    embedding: EmbeddingSection = field(default_factory=EmbeddingSection)
    optim: OptimSection = field(default_factory=OptimSection)
    eval: EvalSection = field(default_factory=EvalSection)
    balance: BalanceSection = field(default_factory=BalanceSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    comm: CommSection = field(default_factory=CommSection)

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_config` reads back to an equal object."""
        plain = {
            section: {key: _plain(entry) for key, entry in dataclasses.asdict(value).items()}
            for section, value in self._sections()
        }
        return yaml.safe_dump(plain, sort_keys=False)

    def _sections(self) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(self):
            yield item.name, getattr(self, item.name)


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
        where = f"in {recipe}" if recipe else "in the overrides"
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
            default = yaml.safe_dump(_plain(item.default), default_flow_style=True).splitlines()[0]
            yield f"{section.name}.{item.name}", _type_name(hints[item.name]), default, item.metadata["help"]


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice: one of the two would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        seen: list[Any] = []
        for name in names:
            key = self.construct_object(name, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=name.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


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


def _plain(value: Any) -> Any:
    """As YAML knows it."""
    return list(value) if isinstance(value, tuple) else value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "the recipe does not exist", got=path, next_step="`ls recipes/` lists those that ship"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the recipe cannot be read", got=f"{path}: {error}") from None
    try:
        values = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("the recipe is not valid YAML", got=f"{path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("a recipe is a mapping of sections", got=f"{path} holds a {type(values).__name__}")
    return values


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
    if config.model.dim % config.model.heads:
        problems.append(f"model.heads: must divide model.dim = {config.model.dim}, got {config.model.heads}")
    if config.embedding.id_map == "hash" and config.embedding.rows is None:
        problems.append("embedding.rows: required when embedding.id_map=hash")
    if config.head.kind == "retrieval" and config.eval.metric == "auc":
        problems.append("eval.metric: auc belongs to head.kind=ranking")
    if config.head.kind == "ranking" and config.eval.metric != "auc":
        problems.append(f"eval.metric: head.kind=ranking is judged by auc, got {config.eval.metric}")
    if config.head.kind == "ranking" and not config.head.label_thresholds:
        problems.append("head.label_thresholds: a ranking head needs at least one")
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
