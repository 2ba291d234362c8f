"""How long a GPU works in a step: fitted to steps seen kernel by kernel, and doubted where the host contradicts it.

A stretch between two moments of a stream is not work: a host that is slow leaves gaps between kernels. What the kernels
themselves take depends on the size of a step and hardly on the host, so a few steps seen by the profiler tell it for
all others of the run. Beside it stands a test that costs nothing: a moment that the device reaches when the host has
just recorded it found the stream dry, one that it reaches much later found it fed. Where the two contradict each other,
the busy time is unknown, and that is said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from freescale.balance import COEFFICIENTS, MeasuredStep, fit_cost_model
from freescale.errors import DataError

FEWEST_SEEN, FEWEST_STEPS = 3, 10
"""Steps that must have been seen to know anything, and to tell what grows with samples, tokens and squares."""

DRY_S = 20e-6
"""A lag of at most so much more than that of an idle stream: there was nothing left to run."""

FED_S, FED_SHARE = 2e-4, 0.1
"""A lag of at least so much, and of such a share of the step's work: the host is well ahead."""

_FULL = 0.9
"""A stretch is that full of work where the device is the one that is waited for. Where it is not, its length is the
host's, however far the host was ahead at the moments that are known."""

_REMEMBERED = 64
_LARGEST_ERROR = 0.05


class SeenStep(NamedTuple):
    """A step that was seen kernel by kernel. Milliseconds.

    Args:
        load: what there was to compute.
        stretch_ms: compute stretches, replays left out.
        busy_ms: the device worked in them.
        model_ms: it worked in forward and backward, replays left out.
        replayed: whether any part of the step was a replay.
        fed: whether the host was ahead all the time.
        copies_ms: copies of other batches, by what was seen of them where nothing else was computed or waited for.
    """

    load: MeasuredStep
    stretch_ms: float
    busy_ms: float
    model_ms: float
    replayed: bool
    fed: bool
    copies_ms: float = 0.0


class _Line(NamedTuple):
    """Milliseconds by the size of a step; `error` is relative, of steps the fit had not seen."""

    fixed_ms: float
    per_sample_ms: float = 0.0
    per_token_ms: float = 0.0
    per_square_ms: float = 0.0
    error: float = 0.0

    def ms(self, load: MeasuredStep) -> float:
        linear = self.fixed_ms + self.per_sample_ms * load.num_samples + self.per_token_ms * load.tokens
        return linear + self.per_square_ms * load.squares


class _Known(NamedTuple):
    """What steps of one kind have told; `fill` is busy over stretch while the host was ahead, None if it never was."""

    busy: _Line
    model: _Line
    fill: float | None
    copies_ms: float = 0.0


@dataclass
class BusyTimes:
    """Busy time of any step, from those that were seen.

    Args:
        idle_lag: seconds that recording a moment takes on a stream that has nothing to do.
        problem: why nothing is known; empty where something is.
        stale: why nothing newer is known; empty where the last look told something.
    """

    idle_lag: float = 0.0
    problem: str = "no step has been seen kernel by kernel yet"
    stale: str = ""
    _seen: dict[bool, deque[SeenStep]] = field(default_factory=dict)
    _known: dict[bool, _Known] = field(default_factory=dict)
    _recent: deque[tuple[float, bool, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def learn(self, steps: Sequence[SeenStep]) -> None:
        """Fit anew with these; nothing is known where they do not tell."""
        for step in steps:
            self._seen.setdefault(step.replayed, deque(maxlen=_REMEMBERED)).append(step)
        self._recent.clear()
        self.problem = self.stale = ""
        whole, replayed = (self._seen.get(kind, ()) for kind in (False, True))
        for seen in (whole, replayed):
            # A few steps with a replay are better told by many without one: what is left of them is the same work.
            if len(seen) < (FEWEST_STEPS if seen is replayed and False in self._known else FEWEST_SEEN):
                continue
            known = _fit(seen)
            shares = [step.busy_ms / step.stretch_ms for step in seen if step.stretch_ms > 0]
            off = known.busy.error * _median(shares)
            if off > _LARGEST_ERROR:
                self.problem = f"the device's work does not follow the sizes of batches: {off:.0%} off"
            self._known[seen is replayed] = known
        if not self._known:
            self.problem = f"fewer than {FEWEST_SEEN} steps were seen kernel by kernel"

    def missed(self, why: str) -> None:
        """Steps could not be seen: what was known before still holds, else nothing is known."""
        if self._known:
            self.stale = why
        else:
            self.problem = why

    def forget(self) -> None:
        """Steps seen so far say nothing of those to come."""
        self._seen.clear()

    def busy_s(
        self,
        load: MeasuredStep | None,
        stretch_s: float,
        *,
        lags: Sequence[float],
        replayed: bool,
        dry: float | None = None,
    ) -> float | None:
        """Seconds that the device worked in the compute stretches of a step, replays left out; None if unknown.

        `dry` is the share of dry moments, where it has been told from the lags already.
        """
        if self.problem or load is None:
            return None
        known = self._known.get(replayed)
        if known is None:
            return self._beside_replay_s(load, stretch_s) if replayed else None
        fed = is_fed(lags, stretch_s)
        if fed and known.fill is not None and known.fill >= _FULL:
            return stretch_s * known.fill  # the device itself may have become slower since
        busy = min(stretch_s, known.busy.ms(load) / 1000)
        if stretch_s > 0:
            dry = dry_share(lags, self.idle_lag) if dry is None else dry
            # Fed steps with gaps were seen: then it is no contradiction.
            self._recent.append((dry, fed and known.fill is None, 1 - busy / stretch_s))
            if len(self._recent) == _REMEMBERED:
                self._doubt()
        return busy

    def copies_s(self, outside_s: float, total_s: float, *, replayed: bool) -> float:
        """Seconds that the device copied other batches outside of all stretches of a step, which are so long in all.

        Copies of batches to come run whenever they come: as much of them falls outside as there is outside.
        """
        known = self._known.get(replayed)
        if self.problem or known is None or outside_s <= 0:
            return 0.0
        return min(outside_s, known.copies_ms / 1000 * outside_s / total_s)

    def model_ms(self, load: MeasuredStep, stretch_ms: float, *, lags: Sequence[float]) -> float:
        """Milliseconds of forward and backward, as the balance should know them; the stretch if nothing is known."""
        known = self._known.get(False)
        if self.problem or known is None or is_fed(lags, stretch_ms / 1000):
            return stretch_ms
        return min(stretch_ms, known.model.ms(load))

    def _beside_replay_s(self, load: MeasuredStep, stretch_s: float) -> float | None:
        """What is left of a step whose forward and backward is a replay, from steps without one."""
        known = self._known.get(False)
        if known is None:
            return None if stretch_s > 0 else 0.0
        return min(stretch_s, max(0.0, known.busy.ms(load) - known.model.ms(load)) / 1000)

    def _doubt(self) -> None:
        """Hold what the kernels told against how far the host was ahead."""
        dry, fed, idle = (float(np.mean(column)) for column in zip(*self._recent))
        self._recent.clear()
        if fed > 0.9 and idle > 0.2:
            self.problem = (
                f"the host was ahead in {fed:.0%} of the steps, yet {idle:.0%} of their work seems idle"
            )
        elif dry > 0.9 and idle < 0.005:
            self.problem = f"the stream was dry at {dry:.0%} of its moments, yet no idle time was found"


def is_fed(lags: Sequence[float], stretch_s: float) -> bool:
    """Whether the device was behind the host at every moment of a step's work, and clearly so."""
    return bool(lags) and min(lags) > max(FED_S, FED_SHARE * stretch_s)


def dry_share(lags: Sequence[float], idle_lag: float) -> float:
    """The share of a step's moments at which the device had nothing left to run."""
    longest = idle_lag + DRY_S
    return len([lag for lag in lags if lag <= longest]) / len(lags) if lags else 0.0


def _fit(seen: Sequence[SeenStep]) -> _Known:
    fills = [step.busy_ms / step.stretch_ms for step in seen if step.fed and step.stretch_ms > 0]
    return _Known(
        busy=_line([step.load._replace(ms=step.busy_ms) for step in seen]),
        model=_line([step.load._replace(ms=step.model_ms) for step in seen]),
        fill=_median(fills) if len(fills) >= FEWEST_SEEN else None,
        # On average: a copy lies outside of all stretches, or inside one, and seldom in both.
        copies_ms=float(np.mean([step.copies_ms for step in seen])),
    )


def _line(steps: Sequence[MeasuredStep]) -> _Line:
    """Through all of them; flat, or as steep as their tokens, where they are few or do not grow with anything."""
    try:
        fit = fit_cost_model(steps)
    except DataError:
        slope = _median([step.ms / max(1, step.tokens) for step in steps])
        lines = (_Line(_median([step.ms for step in steps])), _Line(0.0, per_token_ms=slope))
        errors = [_median([abs(line.ms(step) / max(step.ms, 1e-9) - 1) for step in steps]) for line in lines]
        return lines[errors.index(min(errors))]._replace(error=min(errors) if slope > 0 else 0.0)
    return _Line(**{name: getattr(fit.model, name) for name in COEFFICIENTS}, error=fit.error)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
