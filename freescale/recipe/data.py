"""The histories, and how a global batch is drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import changed, extra_keys, filled_options, key

if TYPE_CHECKING:
    from pathlib import Path

    from freescale.data import Examples, OnChange, SequenceSource, Split
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The histories and how a global batch is drawn from them."""

    path: str = key(
        "synthetic",
        "'synthetic', a prepared folder, a log of windows, or a raw file to prepare on the way; also s3://, ...",
        free=True,
    )
    source: str = key(
        "auto",
        "what reads data.path; auto: the embedded data set for 'synthetic', else a log or Parquet",
        free=True,
        family="source",
        besides=("auto",),
        elsewhere=("users", "items", "mean_length", "sigma", "zipf", "preference", "features"),
    )
    global_batch: int = key(128, "samples a step, over all ranks", at_least=1)
    global_tokens: int | None = key(None, "tokens a step over all ranks, instead of global_batch", at_least=1)
    max_length: int = key(200, "keep this many latest events of a history", at_least=1)
    order: Literal["shuffled", "listed"] = key(
        "shuffled", "of samples in an epoch; listed: as they stand, which is day by day with head.anchors"
    )
    shuffle_rows: int = key(
        100_000, "histories shuffled together; bounds the memory of the reader", at_least=1
    )
    cache_mb: int = key(256, "memory a process keeps recently read row groups in", at_least=1, free=True)
    disk_cache_gb: float = key(
        32.0, "disk for copies of data that lives elsewhere (s3://...)", at_least=0, free=True
    )
    workers: int | None = key(
        None,
        "loader processes a rank; 0: none; null: on a GPU, as cores are free, up to 4 where steps of one rank are "
        "replayed, 8 with features; 1 on several ranks, 3 with features; else none",
        at_least=0,
        free=True,
    )
    passes: int = key(1, "of a log: how often each window is gone through before the next", at_least=1)
    recent_windows: int | None = key(
        None,
        "of a log: negatives are drawn from and targets ranked among items of the last N windows; null: all so far",
        at_least=1,
    )
    use_time: bool = key(True, "use time stamps where the data has them")
    split: Literal["leave_one_out", "temporal"] = key(
        "leave_one_out", "the last two events of every user held back, or all events from a moment on"
    )
    valid_from: str = key(
        "0.8", "temporal: when training ends: a share of the events, seconds since 1970, or an ISO date"
    )
    test_from: str = key("0.9", "temporal: when validation ends and the test begins; the same")
    extra: Mapping[str, Any] = extra_keys()


@dataclass(frozen=True, kw_only=True)
class SyntheticSection:
    """The embedded data set: long-tailed lengths, Zipf ids, a planted preference."""

    users: int = key(3000, "number of histories", at_least=1)
    items: int = key(1500, "number of items", at_least=10)
    mean_length: float = key(30.0, "mean events a history", at_least=3)
    sigma: float = key(1.0, "spread of the log-normal lengths", at_least=0, at_most=3)
    max_length: int = key(400, "longest history", at_least=4)
    zipf: float = key(1.0, "exponent of the item popularity", at_least=0)
    preference: float = key(
        0.8, "share of events that follow the user's planted taste", at_least=0, at_most=1
    )
    features: bool = key(False, "with features of events, items and users, in which the taste shows")


def problems(config: Config) -> list[str]:
    """Moments that are none, or that do nothing."""
    from freescale.data import read_moment

    found = []
    for name in ("valid_from", "test_from"):
        text = getattr(config.data, name)
        if config.data.split != "temporal" and changed(config.data, name):
            found.append(f"data.{name}: only for data.split=temporal")
        try:
            read_moment(text)
        except ValueError:
            allowed = "a share of the events between 0 and 1, whole seconds since 1970, an ISO date such as 2024-05-06"
            found.append(f"data.{name}: allowed: {allowed}; got {text!r}")
    return found


def build_source(
    config: Config, *, cache: Path | None = None, on_change: OnChange = "refuse"
) -> SequenceSource:
    """The data set of a recipe; a raw file is prepared into `cache` first, and `on_change` when it is another one."""
    import dataclasses

    from freescale.data import LogSource, TemporalSource, open_source, source_kind

    kind = source_kind(config.data.path, config.data.source)
    synthetic = dataclasses.asdict(config.synthetic) if kind.ships else {}
    source = open_source(
        config.data.path,
        kind=kind.name,
        options=filled_options(kind, config.data, **synthetic),
        seed=config.run.seed,
        cache=cache,
        schema=config.features.extra or None,
        on_change=on_change,
    )
    # What a log makes of the key is told with all else that does not go with one.
    if config.data.split == "leave_one_out" or isinstance(source, LogSource):
        return source
    return TemporalSource(source, valid_from=config.data.valid_from, test_from=config.data.test_from)


def build_examples(config: Config, source: SequenceSource, split: Split, *, negatives: bool) -> Examples:
    """One split of the data; only training draws negatives, where the head needs them."""
    from freescale.data import Examples, LogSource
    from freescale.recipe.features import build_features
    from freescale.recipe.log import build_log_examples
    from freescale.recipe.requests import build_requests

    if isinstance(source, LogSource):
        return build_log_examples(config, source, negatives=negatives)
    requests = build_requests(config, source, split)
    if requests is not None:
        return requests
    draws = split == "train" and negatives
    return Examples(
        source=source,
        split=split,
        max_length=config.data.max_length,
        use_time=config.data.use_time,
        num_negatives=config.head.num_negatives if draws else 0,
        seed=config.run.seed,
        features=build_features(config, source),
    )
