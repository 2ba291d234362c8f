"""What one device does in what time, as `freescale profile` wrote it: fits with their errors, rates, slowdowns.

Every time is a line over what it grows with: fixed + per_sample * samples + per_token * tokens + per_square * squares,
in milliseconds (`balance.CostModel`); for rows of a table, `tokens` counts rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from freescale.balance import COEFFICIENTS, CostModel, FloatArray
from freescale.errors import DataError, nearest
from freescale.sim.inputs.shipped import shipped_names, shipped_text

FORMAT = "freescale-profile"
VERSION = 1
TIMES = ("forward", "backward", "optimizer", "find", "gather", "update", "host")
WEIGHTS = "weights"
BY_LAYER = "optim_by_layer"
OPTIONAL_TIMES = (
    WEIGHTS,
    BY_LAYER,
    "host_hiding",
    "row_work",
    "row_work_hiding",
    "exchanges",
    "exchanges_hiding",
)
"""weights: the part of the backward that can be postponed. optim_by_layer: the optimizer where a split backward has
every layer updated when the next forward reaches it; as at once unless given. host_hiding: the host where embedding
traffic is hidden; as without hiding unless given. Others: shared_gpu.py."""
RATES = ("exchange_gb_per_s", "exchange_us", "sum_gb_per_s", "sum_us", "control_us")
SLOWDOWNS = ("sm_kernel_slowdown", "sm_free_slowdown")
OPTIONAL_RATES = (
    "host_to_device_gb_per_s",
    "device_to_host_gb_per_s",
    "device_to_device_gb_per_s",
    *SLOWDOWNS,
    "hiding_ms",
    "hiding_us_per_id",
    "exchange_us_per_rank",
    "sum_us_per_rank",
    "control_us_per_rank",
    "exchange_s_per_gb_per_rank",
    "sum_s_per_gb_per_rank",
    "neighbours_slowdown",
    "hiding_slowdown",
    "shortest_ms",
    "cost_error",
    "cost_error_worst",
    "longest_profiled",
    "pads",
    "graph_cut_us",
)
"""pads: of replayed steps, over the tokens. graph_cut_us: between two graphs, beyond what lies between two kernels."""


@dataclass(frozen=True)
class Timing:
    """One kind of work: its line, and how far off it is on measurements it was not fitted to."""

    fixed_ms: float = 0.0
    per_sample_ms: float = 0.0
    per_token_ms: float = 0.0
    per_square_ms: float = 0.0
    error: float | None = None
    worst_error: float | None = None

    def seconds(
        self,
        *,
        samples: FloatArray | float = 0.0,
        tokens: FloatArray | float,
        squares: FloatArray | float = 0.0,
    ) -> FloatArray:
        """Seconds of batches; nothing where there is neither a sample nor a token."""
        ms = (
            self.fixed_ms
            + self.per_sample_ms * np.asarray(samples)
            + self.per_token_ms * np.asarray(tokens, dtype=np.float64)
            + self.per_square_ms * np.asarray(squares)
        )
        return np.asarray(1e-3 * ms, dtype=np.float64)


def cost_model_of(times: Mapping[str, Timing]) -> CostModel:
    """Forward and backward together: what a balancer plans with."""
    forward, backward = times["forward"], times["backward"]
    return CostModel(**{name: getattr(forward, name) + getattr(backward, name) for name in COEFFICIENTS})


@dataclass(frozen=True)
class Profile:
    """A measured device.

    Args:
        device: "cpu" or "cuda".
        hardware: its name.
        model: what was trained: kind, layers, dim, heads, dtype, dense_parameters, table_dim, row_bytes.
        times: of each of TIMES, and those of OPTIONAL_TIMES that were measured.
        rates: of exchanges between two ranks of this device, and of copies; microseconds and 10^9 bytes a second.
        jitter: relative standard deviation of a step's compute when the same batch comes again. `rates["cost_error"]`
            is that of different batches about the fit; a profile without it has both in its jitter.
        measured: which times and rates were measured; the others are derived or assumed, and marked so.
        shared_by: ranks that shared the device side by side while it was measured, and whose exchanges `rates` are.
        facts: versions, date, command, and whatever else tells how it was made.
    """

    device: str
    hardware: str
    model: Mapping[str, Any]
    times: Mapping[str, Timing]
    rates: Mapping[str, float]
    jitter: float
    measured: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    shared_by: int = 1

    @property
    def has_links(self) -> bool:
        """Whether ranks talk at the speeds in `rates`, not at those of a cluster: ranks of one CPU or of one GPU."""
        return self.device == "cpu" or self.shared_by > 1

    def slowdowns(self) -> dict[str, tuple[float, str]]:
        """Compute beside copies, where it was measured: number of a cluster -> value and source."""
        source = f"measured by the profile of {self.hardware}"
        return {
            name: (max(1.0, self.rates[name]), source)
            for name in SLOWDOWNS
            if name in self.rates and f"rates.{name}" in self.measured
        }

    def to_json(self) -> str:
        """The profile as its file."""
        times = {name: asdict(timing) for name, timing in self.times.items()}
        document = {"format": FORMAT, "version": VERSION, **asdict(self), "times": times}
        document["measured"] = list(self.measured)
        return json.dumps(document, indent=2) + "\n"


def shipped() -> list[str]:
    """The profiles that come with FreeScale."""
    return shipped_names("profiles", ".json")


def load_profile(name: str) -> Profile:
    """A profile that ships, by its name, or a file.

    Raises:
        DataError: there is none, or it is not a profile of this version.
    """
    if name in shipped():
        return parse_profile(shipped_text("profiles", f"{name}.json"), where=name)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        close = nearest(name, shipped())
        raise DataError(
            f"The profile {name} cannot be read.",
            got=str(error),
            allowed=f"a file that `freescale profile --out FILE` wrote, or one of {', '.join(shipped())}",
            next_step=f"--profile {close}" if close else "freescale profile --out profile.json",
        ) from None
    return parse_profile(text, where=name)


def parse_profile(text: str, *, where: str) -> Profile:
    """A profile from its text, everything in it checked."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _no_profile(where, f"no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _no_profile(where, f'JSON without "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise DataError(
            f"The profile {where} has a version this release cannot read.",
            got=document.get("version"),
            allowed=VERSION,
            next_step="freescale profile --out FILE",
        )
    problems: list[str] = []
    given = document.get("times")
    more = [name for name in OPTIONAL_TIMES if isinstance(given, dict) and name in given]
    times = {name: _timing(name, given, problems) for name in (*TIMES, *more)}
    rates = _rates(document.get("rates"), problems)
    jitter = document.get("jitter")
    if not _is_number(jitter):
        problems.append(f"jitter must be a number of at least 0, got {jitter!r}")
    shared_by = document.get("shared_by", 1)
    if not isinstance(shared_by, int) or isinstance(shared_by, bool) or shared_by < 1:
        problems.append(f"shared_by must be a whole number of at least 1, got {shared_by!r}")
    if not isinstance(document.get("model"), dict):
        problems.append("model must say what was trained")
    if problems:
        raise DataError(
            f"The profile {where} cannot be used:\n  - " + "\n  - ".join(problems),
            next_step="measure it again",
        )
    return Profile(
        device=str(document.get("device", "cpu")),
        hardware=str(document.get("hardware", "unknown")),
        model=document["model"],
        times=times,
        rates=rates,
        jitter=float(jitter),  # type: ignore[arg-type]
        measured=tuple(map(str, document.get("measured", ()))),
        facts=document.get("facts") or {},
        shared_by=shared_by,
    )


def _no_profile(where: str, got: str) -> DataError:
    return DataError(
        f"{where} is not a profile.",
        got=got,
        allowed=f"a file that `freescale profile --out FILE` wrote, or one of {', '.join(shipped())}",
        next_step="freescale profile --out profile.json",
    )


def _timing(name: str, times: object, problems: list[str]) -> Timing:
    given = times.get(name) if isinstance(times, dict) else None
    if not isinstance(given, dict):
        problems.append(
            f"times.{name} " + ("is missing" if given is None else f"must be an object, got {given!r}")
        )
        return Timing()
    bad = [key for key in COEFFICIENTS if not _is_number(given.get(key, 0.0))]
    if bad:
        problems.append(f"times.{name}.{bad[0]} must be a number of at least 0, got {given[bad[0]]!r}")
        return Timing()
    numbers = {key: float(given.get(key, 0.0)) for key in COEFFICIENTS}
    errors = {key: given.get(key) for key in ("error", "worst_error") if _is_number(given.get(key))}
    return Timing(**numbers, **errors)  # type: ignore[arg-type]


def _rates(given: object, problems: list[str]) -> dict[str, float]:
    rates = given if isinstance(given, dict) else {}
    for name in (*RATES, *(name for name in OPTIONAL_RATES if name in rates)):
        if not _is_number(rates.get(name)):
            problems.append(f"rates.{name} must be a number of at least 0, got {rates.get(name)!r}")
    for name in ("exchange_gb_per_s", "sum_gb_per_s"):
        if _is_number(rates.get(name)) and not rates[name] > 0:
            problems.append(f"rates.{name} must be above 0")
    known = (*RATES, *OPTIONAL_RATES)
    return {name: float(value) for name, value in rates.items() if name in known and _is_number(value)}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0
