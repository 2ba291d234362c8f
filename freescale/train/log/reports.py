"""The line of every step: its numbers read back, summed over the ranks, handed to the accounts.

On a GPU a step is reported when the next one has been queued: its loss has then long arrived, and the device never
stands idle for a host that waits for it.
"""

from __future__ import annotations

import socket
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from freescale import trace
from freescale.balance import StepPlan
from freescale.comm import AloneTransport, Pending, Transport
from freescale.comm.traffic import open_cpu_channel, start_all_reduce
from freescale.comm.world import Ranks, gather, on_one_machine
from freescale.errors import TrainingError
from freescale.pipeline import ReadyBatch, TableTraffic, Traffic, busiest_owner
from freescale.train.accounts.accounting import AccountedStep, Accounts
from freescale.train.compute.step import StepResult
from freescale.train.extension import StepExtension, check_fields
from freescale.train.log.events import Progress, time_fields
from freescale.train.stop_request import StopRequest

_SUM = "sum the loss"
_PLAN_BITS = 20
"""Squares of so many bits, added up over 8,192 ranks, are whole numbers in float64."""


class _Taken(NamedTuple):
    """A step that has been queued: what its line will say."""

    plan: StepPlan
    traffic: Traffic
    histories: Tensor
    result: StepResult
    seconds: float


class _Summing(NamedTuple):
    """A step whose numbers are on their way: how many each part has, and since when this rank has been ready."""

    taken: _Taken
    lengths: list[int]
    arriving: Pending
    arrival: trace.Arrival | None


@dataclass(kw_only=True)
class StepReports:
    """Reports steps in order, each when its numbers are there.

    Args:
        ranks: whose numbers are added up.
        check: raises where the numbers of a step cannot be gone on with.
        extensions: whose counts are added up with the loss, in their order.
        progress: hears of the newest loss.
        accounts: hold the lines until their time is accounted for.
        channel: adds the numbers up.
        lag: steps that may be queued before one is reported.
        stop: whether this rank was told to stop; travels with the numbers.
        told_to_stop: whether any rank was; all of them see it turn after the same step.
        beside: numbers are added up beside the next step: between machines, that is a round trip nobody waits for.
        tables: whose rows travel between the ranks, in an order that is the same on all of them.
    """

    ranks: Ranks
    check: Callable[[StepPlan, Tensor, StepResult], None]
    extensions: Sequence[StepExtension]
    progress: Progress
    accounts: Accounts
    channel: Transport = field(default_factory=AloneTransport)
    lag: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    told_to_stop: bool = False
    beside: bool = False
    tables: Sequence[str] = ()
    _captured: deque[bool] = field(default_factory=lambda: deque(maxlen=100))
    _waiting: deque[_Taken] = field(default_factory=deque)
    _summing: _Summing | None = None

    def add(self, ready: ReadyBatch, result: StepResult, *, seconds: float) -> None:
        """A step has been queued, and took the host this long; report those before it, or all without a lag."""
        # Not the batch itself: its rows and gradients take memory that the next step needs.
        histories = ready.batch.samples["row"]
        self._waiting.append(_Taken(ready.plan, ready.traffic, histories, result, seconds))
        while len(self._waiting) > self.lag:
            self._sum(self._waiting.popleft())
        if not self.beside:
            self._report()

    def flush(self) -> None:
        """Report everything: before an evaluation, a checkpoint, the end. Every rank must call it."""
        while self._waiting:
            self._sum(self._waiting.popleft())
        self._report()

    def _sum(self, taken: _Taken) -> None:
        """Begin to add up over the ranks: loss, traffic and counts are those of the global batch."""
        self._report()
        self.check(taken.plan, taken.histories, taken.result)
        # One place a rank: the sum shows what each of them has served.
        served = [0.0] * self.ranks.num_ranks
        served[self.ranks.rank] = taken.traffic.served_bytes
        numbers = [taken.result.loss, *taken.traffic.values(self.tables), *served]
        own = torch.tensor(numbers, dtype=torch.float64)
        alike = torch.tensor([*plan_numbers(taken.plan.plan_hash), self.stop.requested], dtype=torch.float64)
        parts = [own, *(counts.double() for counts in taken.result.counted), alike]
        arrival = trace.arrive(_SUM)
        arriving = start_all_reduce(self.channel, torch.cat(parts))
        self._summing = _Summing(taken, [len(part) for part in parts], arriving, arrival)

    def _report(self) -> None:
        """Hand over the step whose numbers are being added up, if there is one."""
        if self._summing is None:
            return
        (taken, lengths, arriving, arrival), self._summing = self._summing, None
        began = trace.mark(on_device=False)
        numbers, *counted, alike = arriving.wait().split(lengths)
        if self.ranks.num_ranks > 1:
            trace.waited(arrival, began)
        plan, result = taken.plan, taken.result
        loss, *moved = numbers.tolist()
        moved, served = moved[: -self.ranks.num_ranks], moved[-self.ranks.num_ranks :]
        *plans, stops = alike.tolist()
        if not is_one_plan(*plans, num_ranks=self.ranks.num_ranks):
            self._name_odd_plan(plan)
        self.told_to_stop = self.told_to_stop or stops > 0
        line: dict[str, object] = {
            "loss": loss,
            "tokens": plan.global_tokens,
            "imbalance": plan.imbalance,
            "imbalance_in_turn": plan.imbalance_in_turn,
            "bound": plan.bound,
            "epoch": plan.epoch,
            "plan": plan.plan_hash,
            **traffic_fields(Traffic.from_values(moved, self.tables), self.ranks, served=served),
        }
        for extension, summed in zip(self.extensions, counted, strict=True):
            fields = extension.fields(summed, plan)
            check_fields(extension, fields, line=line)
            line |= fields
        if result.captured is not None:
            self._captured.append(result.captured)
            line["captured"] = sum(self._captured) / len(self._captured)
        if result.grad_norm is not None:
            line["grad_norm"] = result.grad_norm
        self.progress.tick(plan.step + 1, loss=loss, epoch=plan.epoch, imbalance=plan.imbalance)
        self.accounts.add(plan.step + 1, line, seconds=taken.seconds)

    def _name_odd_plan(self, plan: StepPlan) -> NoReturn:
        """Some ranks have trained other samples than the rest believes; all of them are here, so they can compare."""
        here = (socket.gethostname(), plan.plan_hash)
        everybody = gather(here, group=self.ranks.control, what="compare plans")
        (host, wanted), *_ = everybody
        rank, (odd_host, got) = next((rank, told) for rank, told in enumerate(everybody) if told[1] != wanted)
        raise TrainingError(
            f"rank {rank} on {odd_host} has planned step {plan.step + 1} otherwise than rank 0 on {host}",
            got=f"plan {wanted} on rank 0, {got} on rank {rank}",
            next_step="use the same versions of Python packages everywhere, and balancers that give the same "
            "answer on every machine; the run resumes from its last checkpoint",
        )


def plan_numbers(plan_hash: str) -> tuple[int, int]:
    """A few bits of the plan's hash and their square: their sums over the ranks tell whether all are alike."""
    bits = zlib.crc32(plan_hash.encode()) % (1 << _PLAN_BITS)
    return bits, bits * bits


def is_one_plan(values: float, squares: float, *, num_ranks: int) -> bool:
    """Whether the numbers added up were all the same: those alone have the square of their mean as mean square."""
    return int(values) ** 2 == num_ranks * int(squares)


def open_report_channel(ranks: Ranks, *, kind: str = "auto") -> Transport:
    """How the numbers of a step are added up: straight from every rank to every other, one trip.

    A sum of gloo's takes a ring: 85 ms on 2 ranks with 20 ms between them, 218 on 4, instead of 46. On one machine the
    ranks do it themselves: gloo's threads need 2.2 ms on two busy cores, 7.7 ms where four ranks share them.
    """
    if ranks.control is None:
        return AloneTransport()
    return open_cpu_channel(ranks.control, device=ranks.device, kind=kind, timeout_s=ranks.timeout_s)


def lag_of(ranks: Ranks) -> int:
    """How many steps may be queued before one is reported."""
    return 1 if ranks.device.type == "cuda" else 0


def is_beside(ranks: Ranks, extensions: Sequence[StepExtension]) -> bool:
    """Whether numbers are added up beside the next step: where they travel between machines, and would not be late."""
    late = lag_of(ranks) > 0 and any(extension.acts for extension in extensions)
    return ranks.num_ranks > 1 and not on_one_machine() and not late


def write_step(progress: Progress, accounted: AccountedStep) -> None:
    """The event of a step, once its time is accounted for."""
    line: dict[str, Any] = dict(accounted.line)
    times = time_fields(accounted.ranks, tokens=line.pop("tokens"), seconds=accounted.seconds)
    progress.step(accounted.step, **{**line, **times, **busy_fields(accounted)})


def busy_fields(accounted: AccountedStep) -> dict[str, object]:
    """What the line of a step on GPUs says of its busy time; nothing on CPUs, whose hosts are their devices."""
    if accounted.dry is None:
        return {}
    fields: dict[str, object] = {"dry": round(accounted.dry, 4)}
    if accounted.unknown:
        fields["busy_unknown"] = list(accounted.unknown)
    if accounted.watched:
        fields["watched"] = True
    return fields


def traffic_fields(traffic: Traffic, ranks: Ranks, *, served: Sequence[float]) -> dict[str, object]:
    """What a step moved between the ranks, table by table where there are several; nothing where one rank is alone."""
    if ranks.num_ranks == 1:
        return {}
    total = traffic.total
    fields: dict[str, object] = {
        "overlap": total.overlap,
        "exposed_bytes": int(total.exposed_bytes),
        "hidden_bytes": int(total.hidden_bytes),
        "parked_rows": int(total.parked_rows),
        "exposed_ms": traffic.exposed_ms / ranks.num_ranks,
        "split_ms": traffic.split_ms / ranks.num_ranks,
        "busiest_owner": round(busiest_owner(served), 4),
    }
    if len(traffic.tables) > 1:
        fields["tables"] = {name: _table_fields(moved) for name, moved in traffic.tables.items()}
    return fields


def _table_fields(moved: TableTraffic) -> dict[str, float]:
    return {
        "rows": int(moved.unique_rows),
        "overlap": round(moved.overlap, 4),
        "exposed_bytes": int(moved.exposed_bytes),
        "hidden_bytes": int(moved.hidden_bytes),
    }
