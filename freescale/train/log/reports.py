"""The line of every step: its numbers read back, summed over the ranks, handed to the accounts.

On a GPU a step is reported when the next one has been queued: its loss has then long arrived, and the device never
stands idle for a host that waits for it. Where an extension needs the counts of a step before the next one begins, as
routers do that are balanced by them, steps are reported at once.
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

from freescale.balance import StepPlan
from freescale.comm import Transport
from freescale.comm.traffic import open_cpu_channel, start_all_reduce
from freescale.comm.transports import is_foreign
from freescale.comm.world import Ranks, on_one_machine
from freescale.errors import TrainingError
from freescale.pipeline import ReadyBatch, Traffic
from freescale.trace import exchange
from freescale.train.extension import StepExtension, check_fields
from freescale.train.log.accounting import AccountedStep, Accounts
from freescale.train.log.events import Progress, time_fields
from freescale.train.state.agreement import gather
from freescale.train.step import StepResult
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


@dataclass(kw_only=True)
class StepReports:
    """Reports steps in order, each when its numbers are there.

    Args:
        ranks: whose numbers are added up.
        check: raises where the numbers of a step cannot be gone on with.
        extensions: whose counts are added up with the loss, in their order.
        progress: hears of the newest loss.
        accounts: hold the lines until their time is accounted for.
        channel: adds the numbers up; the control group does where there is none.
        lag: steps that may be queued before one is reported.
        stop: whether this rank was told to stop; travels with the numbers.
        told_to_stop: whether any rank was; all of them see it turn after the same step.
    """

    ranks: Ranks
    check: Callable[[StepPlan, Tensor, StepResult], None]
    extensions: Sequence[StepExtension]
    progress: Progress
    accounts: Accounts
    channel: Transport | None = None
    lag: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    told_to_stop: bool = False
    _waiting: deque[_Taken] = field(default_factory=deque)

    def add(self, ready: ReadyBatch, result: StepResult, *, seconds: float) -> None:
        """A step has been queued, and took the host this long; report those before it, or all without a lag."""
        # Not the batch itself: its rows and gradients take memory that the next step needs.
        histories = ready.batch.samples["row"]
        self._waiting.append(_Taken(ready.plan, ready.traffic, histories, result, seconds))
        while len(self._waiting) > self.lag:
            self._report(self._waiting.popleft())

    def flush(self) -> None:
        """Report everything: before an evaluation, a checkpoint, the end. Every rank must call it."""
        while self._waiting:
            self._report(self._waiting.popleft())

    def _report(self, taken: _Taken) -> None:
        """Loss, traffic and counts are summed over the ranks: those of the global batch."""
        plan, result = taken.plan, taken.result
        self.check(plan, taken.histories, result)
        own = torch.tensor([result.loss, *taken.traffic.values()], dtype=torch.float64)
        alike = torch.tensor([*plan_numbers(plan.plan_hash), self.stop.requested], dtype=torch.float64)
        parts = [own, *(counts.double() for counts in result.counted), alike]
        sums = self._sum(torch.cat(parts))
        numbers, *counted, alike = sums.split([len(part) for part in parts])
        loss, *moved = numbers.tolist()
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
            **traffic_fields(Traffic(*moved), self.ranks),
        }
        for extension, summed in zip(self.extensions, counted, strict=True):
            fields = extension.fields(summed, plan)
            check_fields(extension, fields, line=line)
            line |= fields
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

    def _sum(self, values: Tensor) -> Tensor:
        if self.channel is None:
            return self.ranks.sum_on_cpu(values, what=_SUM)
        with exchange(_SUM):
            return start_all_reduce(self.channel, values).wait()


def plan_numbers(plan_hash: str) -> tuple[int, int]:
    """A few bits of the plan's hash and their square: their sums over the ranks tell whether all are alike."""
    bits = zlib.crc32(plan_hash.encode()) % (1 << _PLAN_BITS)
    return bits, bits * bits


def is_one_plan(values: float, squares: float, *, num_ranks: int) -> bool:
    """Whether the numbers added up were all the same: those alone have the square of their mean as mean square."""
    return int(values) ** 2 == num_ranks * int(squares)


def open_report_channel(ranks: Ranks, *, kind: str = "auto") -> Transport | None:
    """How the numbers of a step are added up: by ranks of one machine themselves, or by a transport from outside.

    None where the control group does it: gloo's threads need 2.2 ms on two busy cores, 7.7 ms where four ranks share
    them.
    """
    if ranks.control is None or not (on_one_machine() or is_foreign(kind)):
        return None
    return open_cpu_channel(ranks.control, device=ranks.device, kind=kind, timeout_s=ranks.timeout_s)


def lag_of(ranks: Ranks, extensions: Sequence[StepExtension]) -> int:
    """How many steps may be queued before one is reported."""
    at_once = any(extension.needs_last_step for extension in extensions)
    return 1 if ranks.device.type == "cuda" and not at_once else 0


def write_step(progress: Progress, accounted: AccountedStep) -> None:
    """The event of a step, once its time is accounted for."""
    line: dict[str, Any] = dict(accounted.line)
    times = time_fields(accounted.ranks, tokens=line.pop("tokens"), seconds=accounted.seconds)
    progress.step(accounted.step, **{**line, **times})


def traffic_fields(traffic: Traffic, ranks: Ranks) -> dict[str, float]:
    """What a step moved between the ranks; nothing where there is one rank only."""
    if ranks.num_ranks == 1:
        return {}
    return {
        "overlap": traffic.overlap,
        "exposed_bytes": int(traffic.exposed_bytes),
        "hidden_bytes": int(traffic.hidden_bytes),
        "parked_rows": int(traffic.parked_rows),
        "exposed_ms": traffic.exposed_ms / ranks.num_ranks,
        "split_ms": traffic.split_ms / ranks.num_ranks,
    }
