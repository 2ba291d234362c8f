"""What is trained: where lengths come from, how ids are spread, how large batches, rows and the dense model are."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale.balance import IntArray, bucket_bytes
from freescale.data import LENGTHS_FILE, damaged, is_dataset, load_manifest
from freescale.errors import ConfigError, DataError, nearest
from freescale.sim.inputs.table_loads import TableLoad, read_tables

_KINDS = {
    "lognormal": "lognormal:MEDIAN,SIGMA,LONGEST",
    "pareto": "pareto:SHORTEST,EXPONENT,LONGEST",
    "fixed": "fixed:LENGTH",
}


def _number(default: Any, help: str, *, at_least: float = 0.0, at_most: float = math.inf) -> Any:
    return field(default=default, metadata={"help": help, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training job, whatever the cluster. Defaults: an HSTU of 8 layers and width 512 on long-tailed histories."""

    samples_per_gpu: int = _number(32, "samples of a global batch for every GPU", at_least=1)
    ids_per_token: float = _number(1.0, "ids that every event of a history looks up", at_least=0)
    ids_per_sample: float = _number(
        0.0, "further ids a sample looks up, as popular as those of events", at_least=0
    )
    negatives: float = _number(
        0.0,
        "negatives a sample looks up, all ids alike; with several tables they are among their ids",
        at_least=0,
    )
    table_rows: int = _number(100_000_000, "different ids", at_least=1)
    zipf: float = _number(1.0, "exponent of the popularity of ids", at_least=0, at_most=4)
    row_bytes: int = _number(2048, "bytes of a row, and of its gradient, as it travels", at_least=1)
    stored_share: float = _number(
        1.0,
        "bytes of a row as it is stored and sent, over those of its gradient; 0.5 with embedding.dtype=bfloat16",
        at_least=0.01,
        at_most=1,
    )
    dense_bytes: float = _number(42e6, "bytes of dense gradients summed over all ranks a step", at_least=0)
    bucket_bytes: float = _number(
        0, "dense gradients travel in pieces of this size; 0: as training cuts them"
    )
    max_length: int = _number(1 << 30, "longer histories are cut to their latest events", at_least=1)
    lengths: str = "lognormal:512,1.0,8192"
    tables: str = ""

    def __post_init__(self) -> None:
        if not self.bucket_bytes:
            object.__setattr__(self, "bucket_bytes", float(bucket_bytes(self.dense_bytes)))

    def table_loads(self) -> tuple[TableLoad, ...]:
        """Every table: those of `tables`, or the one that the other numbers speak of."""
        alone = TableLoad(
            "item", self.table_rows, self.row_bytes, self.ids_per_token, self.ids_per_sample, self.zipf
        )
        several = read_tables(self.tables)
        return tuple(replace(each, zipf=self.zipf) if each.zipf is None else each for each in several) or (
            alone,
        )

    def words(self, *, rank: str = "GPU") -> str:
        """One line about it; `rank` is what a rank computes on."""
        tables = self.table_loads()
        rows = f"{self.table_rows:,} rows of {self.row_bytes:,} bytes"
        if self.tables:
            rows = f"{len(tables)} tables of {sum(table.rows for table in tables):,} rows"
        return f"{self.samples_per_gpu} samples a {rank}, lengths {self.lengths}, {rows}, Zipf {self.zipf:g}"


def draw_lengths(workload: Workload, count: int, *, seed: int) -> IntArray:
    """Lengths of `count` histories: of a distribution, or drawn from those of a file or a data set."""
    rng = np.random.default_rng([seed, 77])
    kind, _, rest = workload.lengths.partition(":")
    lengths = _drawn(kind, rest, count, rng) if kind in _KINDS else rng.choice(_read(workload.lengths), count)
    return np.clip(lengths, 1, workload.max_length).astype(np.int64)


def _drawn(kind: str, text: str, count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    try:
        numbers = [float(part) for part in text.split(",")]
        if kind == "fixed":
            (first,) = numbers
            second, longest = 1.0, first
        else:
            first, second, longest = numbers
    except ValueError:
        raise ConfigError("the lengths cannot be read", got=f"{kind}:{text}", allowed=_KINDS[kind]) from None
    is_spread = second > 0 or (kind == "lognormal" and second == 0)
    if not (all(map(math.isfinite, numbers)) and min(first, longest) >= 1 and is_spread):
        allowed = f"{_KINDS[kind]}, lengths of at least 1"
        raise ConfigError("the lengths cannot be drawn", got=f"{kind}:{text}", allowed=allowed)
    if kind == "fixed":
        return np.full(count, first)
    if kind == "lognormal":
        return np.minimum(np.exp(rng.normal(np.log(first), second, count)), longest)
    return np.minimum(first * rng.random(count) ** (-1 / second), longest)


def _read(name: str) -> IntArray:
    """All lengths of a prepared data set, a .npy file, or a text file with one length a line."""
    path = Path(name)
    if not path.exists():
        kind = name.partition(":")[0]
        close = nearest(kind, _KINDS)
        raise DataError(
            "there are no lengths",
            got=name,
            allowed=f"a prepared folder, a file of lengths, {', '.join(_KINDS.values())}",
            next_step=f"--lengths {_KINDS[close]}" if close else None,
        )
    if path.is_dir():
        if not is_dataset(path):
            raise DataError(
                "this folder is no data set", got=path, next_step=f"freescale prepare INPUT {path}"
            )
        load_manifest(path)
        try:
            return _checked(np.load(path / LENGTHS_FILE, allow_pickle=False), path / LENGTHS_FILE)
        except (OSError, ValueError, EOFError) as error:
            raise damaged(path / LENGTHS_FILE, str(error)) from None
        except DataError as error:
            raise damaged(path / LENGTHS_FILE, str(error.got)) from None
    try:
        return _checked(_load_file(path), path)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(f"{path}: {error}") from None


def _load_file(path: Path) -> np.ndarray[Any, Any]:
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty file; refused below
        return np.loadtxt(path, dtype=np.int64, ndmin=1)


def _checked(lengths: np.ndarray[Any, Any], path: Path) -> IntArray:
    """Lengths that can be trained on; a history without events is one of length 0."""
    if not lengths.size:
        raise _unreadable(f"{path} is empty")
    if lengths.ndim != 1:
        raise _unreadable(f"{path} has {' x '.join(map(str, lengths.shape))} numbers")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise _unreadable(f"{path} has numbers of type {lengths.dtype}")
    if lengths.min() < 0:
        place = int(np.argmax(lengths < 0))
        raise _unreadable(f"{path}: length {place + 1} of {len(lengths):,} is {lengths[place]}")
    return np.asarray(lengths, dtype=np.int64)


def _unreadable(got: str) -> DataError:
    return DataError(
        "these lengths cannot be used",
        got=got,
        allowed="a text file with one whole number of at least 0 a line, or such an array as .npy",
        next_step="write one length a line, a line for every history; or take a prepared data set with --data DIR",
    )
