"""The clock of a GPU: moments are events on the stream, read once they have passed. It never waits for the device."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from freescale.kernels.runtime import current_stream

_PROBE_S = 0.1
_REANCHOR_S = 10.0
"""Events give their distance in float32 milliseconds: 1 us of rounding at 10 s, 0.25 ms after an hour."""


class CudaMoment:
    """A mark of `CudaClock`; others who want to know when the stream got there need no event of their own."""

    __slots__ = ("clock", "device_s", "event", "recorded", "seconds")

    def __init__(self, event: torch.cuda.Event, clock: CudaClock) -> None:
        self.event: torch.cuda.Event | None = event
        self.clock = clock
        self.recorded = time.monotonic()
        self.seconds: float | None = None
        self.device_s = 0.0

    @property
    def has_passed(self) -> bool:
        """Whether the stream got there."""
        return self.clock.read(self) is not None

    def ms_since(self, earlier: CudaMoment) -> float:
        """Milliseconds of the device between two moments that have passed."""
        both = earlier.has_passed and self.has_passed
        assert both, "a moment that lies ahead"
        return 1000 * (self.device_s - earlier.device_s)


class CudaClock:
    """Turns events of one device into seconds of the host's monotonic clock.

    An event never happens before the host has recorded it. So the largest (recorded - device time) seen lately is the
    distance of the two clocks, exact as soon as one event met an idle stream. The stream that computes is never idle
    where the host is ahead of it; so now and then an event is recorded on a stream of its own, which always is. No
    device synchronisation is needed.

    Args:
        device: the device the model computes on.
    """

    lag = 1
    """Steps the host may be ahead: a step's last event has usually passed when the next step ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._idle = torch.cuda.Stream(device)
        self._probe: CudaMoment | None = None
        self._probed_at = -float("inf")
        self._idle_lags: deque[float] = deque(maxlen=31)
        torch.cuda.synchronize(device)  # once, before the run
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor_s = 0.0
        self._anchor.record()
        self._distance = self._distance_before = time.monotonic()
        self._anchor.synchronize()

    def mark(self) -> Any:
        """An event on the current stream."""
        now = time.monotonic()
        if now - self._probed_at > _PROBE_S and self._probe is None:
            self._probe, self._probed_at = self._record(self._idle), now
        return self._record(None)

    def read(self, mark: Any) -> float | None:
        """When the stream got there, in seconds of the host's clock; None if it has not."""
        if type(mark) is not CudaMoment:
            return float(mark)
        if mark.seconds is not None:
            return mark.seconds
        event = mark.event
        assert event is not None
        if not event.query():
            return None
        if self._probe is not None:
            self._look_at_probe()
        recorded = mark.recorded
        device_s = self._anchor_s + self._anchor.elapsed_time(event) / 1000
        if recorded - device_s > self._distance:
            self._distance = recorded - device_s
        mark.seconds = device_s + max(self._distance, self._distance_before)
        mark.device_s, mark.event = device_s, None
        if device_s - self._anchor_s < _REANCHOR_S:
            self._free.append(event)
        else:
            # The two clocks drift apart by some microseconds a second: only the last two stretches count.
            self._anchor, self._anchor_s = event, device_s
            self._distance_before, self._distance = self._distance, recorded - device_s
        return mark.seconds

    def _look_at_probe(self) -> None:
        probe, self._probe = self._probe, None
        met = self.read(probe)
        if met is None:
            self._probe = probe
        else:
            assert probe is not None
            self._idle_lags.append(met - probe.recorded)

    def lag_of(self, mark: Any) -> float | None:
        """Seconds by which the stream came later than the host; near `idle_lag` where it had run dry."""
        if not isinstance(mark, CudaMoment) or mark.seconds is None:
            return None
        return mark.seconds - mark.recorded

    @property
    def idle_lag(self) -> float:
        """The usual lag of a stream that never has anything to do: what recording an event takes."""
        return sorted(self._idle_lags)[len(self._idle_lags) // 2] if self._idle_lags else 0.0

    def wait_for_marks(self) -> None:
        """Wait for the device, where the run stands still anyway."""
        torch.cuda.synchronize(self._device)

    def _record(self, stream: torch.cuda.Stream | None) -> CudaMoment:
        try:
            event = self._free.pop()
        except IndexError:  # asking first would not do: another thread may take the last one
            event = torch.cuda.Event(enable_timing=True)
        moment = CudaMoment(event, self)
        event.record(current_stream(self._device) if stream is None else stream)
        return moment
