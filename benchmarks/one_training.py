"""What benchmarks of whole training runs share: their losses must be one curve, and only warm steps count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from freescale.trace.metrics_log import Event, step_of
from freescale.trace.time_account import Account, account_of


def losses_of(steps: Iterable[Event]) -> list[float]:
    """The curve of a run."""
    return [float(str(event["loss"])) for event in steps]


def check_one_curve(curves: Sequence[Sequence[float]], *, tolerance: float) -> float:
    """The largest relative difference of any loss from that of the first run; refuses curves that are not one."""
    differences = (
        abs(loss / wanted - 1) for curve in curves for loss, wanted in zip(curve, curves[0], strict=True)
    )
    worst = max(differences)
    if worst > tolerance:
        raise SystemExit(f"FAILED: losses differ by {worst:.2e}; these are not the same training")
    return worst


def warm_account(steps: Iterable[Event], *, warmup: int) -> Account:
    """Where the time of a run went after its first steps."""
    account = account_of([event for event in steps if (step_of(event) or 0) >= warmup])
    assert account is not None
    return account
