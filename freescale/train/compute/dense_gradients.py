"""Dense gradients summed over the ranks, bucket by bucket, under the backward."""

# No postponed annotations here: DDP looks at the types of its communication hook.
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from freescale import trace
from freescale.balance import bucket_bytes
from freescale.comm import Pending, Transport, only_queues, supports_device
from freescale.comm.traffic import Deadline, Gate, open_channel, start_all_reduce
from freescale.comm.transports import is_foreign
from freescale.comm.world import Ranks, on_one_machine

Hook = Callable[[None, GradBucket], torch.futures.Future[Tensor]]

_AUTO = "auto"
_ONE_TRIP_BYTES = 1 << 20
"""Between machines, buckets up to this size travel straight to every rank: two round trips, where a ring of gloo takes
2 (ranks - 1). With 20 ms from machine to machine, 512 kB took 109 ms by the ring on 2 ranks and 341 on 4, straight 54
and 121 ms. Larger buckets are about bytes: a ring sends less of them where a machine has many ranks."""


class Sums:
    """Dense gradients that are being added up over the ranks.

    Args:
        outlast_backward: gradients are not there before `wait`: until then other things can be done.
        by: what carries their parts; None: the group adds up.
    """

    def __init__(self, *, outlast_backward: bool = False, by: Transport | None = None) -> None:
        self.outlast_backward, self.by = outlast_backward, by
        self._waits: list[Callable[[], object]] = []

    def add(self, wait: Callable[[], object]) -> None:
        """One or more buckets are under way; `wait` lets the current stream wait for them."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Let the current stream wait for all of them."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


def reduced_in_backward(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    timeout_s: float = 600.0,
    kind: str = "auto",
    sums: str = "auto",
    gate: Gate | None = None,
    handed_over: Callable[[], object] = lambda: None,
    owned: Collection[str] = (),
) -> tuple[DistributedDataParallel, Sums]:
    """DDP whose buckets are summed, not averaged: the loss is already divided by the global count.

    Gradients are there when the sums have been waited for. The gate is shut while a bucket is under way: bulk that has
    time waits for it. `handed_over` is called for every bucket that this rank is ready to add up. `kind` and `sums` are
    as in `sums_itself`. Parameters in `owned` belong to this rank alone and are left as they are.
    """
    gate = gate or Gate()
    device = next(model.parameters()).device
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(owned))
    with warnings.catch_warnings():
        # Since torch 2.13 deprecated; what is to take its place sends buffers at the start all the same.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_bytes(_dense_bytes(model)) >> 20,
            # Buffers (router biases) follow from sums over all ranks: they are equal everywhere without being sent.
            broadcast_buffers=False,
            # Weights follow from the seed. Comparing them is for groups that can read the device.
            init_sync=supports_device(group, device),
        )
    hook, under_way = _choose_hook(group, device, gate, kind=kind, sums=sums, timeout_s=timeout_s)
    wrapped.register_comm_hook(None, _reported(hook, handed_over))
    return wrapped, under_way


def _choose_hook(
    group: dist.ProcessGroup, device: torch.device, gate: Gate, *, kind: str, sums: str, timeout_s: float
) -> tuple[Hook, Sums]:
    itself = sums_itself(group, device, kind, sums)
    if itself and device.type == "cuda":
        under_way = Sums(outlast_backward=True)
        return _over_group(group, gate, under_way), under_way
    transport = open_sums_channel(group, device, kind=kind, sums=sums, timeout_s=timeout_s)
    if itself:
        under_way = Sums(outlast_backward=True)
        return _between_machines(group, transport, gate, under_way), under_way
    if only_queues(transport):
        under_way = Sums(outlast_backward=device.type == "cuda", by=transport)
        return _queued(transport, gate, under_way, device), under_way
    return _over_transport(transport, gate), Sums(by=transport)


def sums_itself(group: dist.ProcessGroup, device: torch.device, kind: str, sums: str = _AUTO) -> bool:
    """Whether the group adds gradients up, by NCCL between GPUs and by gloo between machines; else a transport does.

    CPU ranks of one machine do without gloo's threads, a group that cannot read the device cannot, and a transport from
    outside the package carries everything, as one does that is named for sums.

    Args:
        group: the ranks.
        device: where their gradients are.
        kind: how rows travel, and sums unless they have a way of their own.
        sums: what a recipe names (`comm.sums`).
    """
    if sums not in (_AUTO, "collective"):
        return False
    without_gloo = device.type == "cpu" and on_one_machine()
    return supports_device(group, device) and not without_gloo and not is_foreign(kind)


def open_sums_channel(
    group: dist.ProcessGroup, device: torch.device, *, kind: str, sums: str, timeout_s: float
) -> Transport:
    """The connection by which parts of sums travel; arguments as in `sums_itself`."""
    if sums == _AUTO:
        return open_channel(group, device=device, kind=kind, timeout_s=timeout_s)
    return open_channel(group, device=device, kind=sums, timeout_s=timeout_s, key="comm.sums")


def _dense_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _reported(hook: Hook, handed_over: Callable[[], object]) -> Hook:
    def reported(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        handed_over()
        return hook(state, bucket)

    return reported


def _over_group(group: dist.ProcessGroup, gate: Gate, sums: Sums) -> Hook:
    def all_reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        gate.shut(Deadline.DENSE_GRADIENTS)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        sums.add(work.wait)
        # Not by a callback of its future: NCCL's is called at once, on the next stream of torch's pool, whosever that
        # is, which then waits for the sum.
        _at_the_end(lambda: gate.open(Deadline.DENSE_GRADIENTS))
        return _done(bucket.buffer())

    return all_reduce_hook


def _between_machines(group: dist.ProcessGroup, transport: Transport, gate: Gate, sums: Sums) -> Hook:
    """CPU ranks on several machines: few trips, and beside the rows that travel after the backward."""

    def all_reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        gate.shut(Deadline.DENSE_GRADIENTS)
        values = bucket.buffer()
        if transport.num_ranks == 2 or values.nbytes <= _ONE_TRIP_BYTES:
            arriving = start_all_reduce(transport, values)
            sums.add(lambda: values.copy_(arriving.wait()))
        else:
            work = dist.all_reduce(values, group=group, async_op=True)
            assert work is not None
            sums.add(work.wait)
        sums.add(lambda: gate.open(Deadline.DENSE_GRADIENTS))
        return _done(values)

    return all_reduce_hook


def _over_transport(transport: Transport, gate: Gate) -> Hook:
    """Without gloo's threads: 12.5 ms instead of 13.5 for a step on two ranks and two cores with 17 KB to add up.

    What arrives is added up, and sent on, at the end of the backward.
    """

    def all_reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        gate.shut(Deadline.DENSE_GRADIENTS)
        done = _future_of(bucket.buffer())
        arriving = start_all_reduce(transport, bucket.buffer())
        _at_the_end(lambda: added(arriving, done))
        return done

    def added(arriving: Pending, done: torch.futures.Future[Tensor]) -> None:
        try:
            done.set_result(arriving.wait())
        finally:
            gate.open(Deadline.DENSE_GRADIENTS)

    return all_reduce_hook


def _queued(transport: Transport, gate: Gate, sums: Sums, device: torch.device) -> Hook:
    """Where waiting only queues, on streams of a GPU: sums beside the backward and what follows."""
    queued = QueuedSums(transport, gate, device) if device.type == "cuda" else None

    def all_reduce_hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        values = bucket.buffer()
        if queued is None:
            gate.shut(Deadline.DENSE_GRADIENTS)
            values.copy_(start_all_reduce(transport, values).wait())
            _at_the_end(lambda: gate.open(Deadline.DENSE_GRADIENTS))
        else:
            queued.start(values)
            if bucket.is_last():
                queued.finish()
                sums.add(queued.wait)
        return _done(values)

    return all_reduce_hook


class QueuedSums:
    """Sums on a stream of a GPU, of which several are under way: while one is added up, parts of the next travel.

        leaving ──[parts of 1]──[parts of 2]──[sum of 1]──[parts of 3]──[sum of 2]── ...
        adding             [add up 1]  ────────────[add up 2]────────────── ...

    Each stands behind parts of the next, which are there sooner than all ranks have sent those of this one. What is
    sent first and last is the same on every rank: it follows from the order of `start` and `finish`.

    Args:
        transport: how parts travel; nobody else's.
        gate: knows when they are through.
        device: the GPU.
    """

    def __init__(self, transport: Transport, gate: Gate, device: torch.device) -> None:
        self._transport, self._gate, self._device = transport, gate, device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._newest: _Adding | None = None

    def start(self, values: Tensor) -> Callable[[], None]:
        """Add up in place, behind what the current stream was given; what waits for it and all before it."""
        with self._gate.urgent(Deadline.DENSE_GRADIENTS):
            arriving = start_all_reduce(self._transport, values)
        self.finish()
        newest = self._newest = _Adding((values, arriving))

        def wait() -> None:
            if newest is self._newest:
                self.finish()
            assert newest.added is not None
            torch.cuda.current_stream(self._device).wait_event(newest.added)

        return wait

    def finish(self) -> None:
        """Queue the rest of what was started last, which would do so itself before the next one."""
        newest, self._newest = self._newest, None
        if newest is None or newest.parts is None:
            return
        # Whoever waits keeps the moment alone: what came from other ranks takes as much memory as all gradients.
        (values, arriving), newest.parts = newest.parts, None
        with self._gate.urgent(Deadline.DENSE_GRADIENTS), torch.cuda.stream(self._stream):
            values.copy_(arriving.wait())
        newest.added = self._stream.record_event()
        self._gate.queued(Deadline.DENSE_GRADIENTS, newest.added)

    def wait(self) -> None:
        """Let the current stream wait for all of them."""
        self.finish()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass
class _Adding:
    """Values and their parts on the way, until the rest is queued; then the moment at which their sum is in place."""

    parts: tuple[Tensor, Pending] | None
    added: torch.cuda.Event | None = None


class FlatSum:
    """Adds gradients up that lie in one piece, outside of any backward: those of a replay.

    Args:
        group: of all ranks.
        device: where the gradients are.
        kind: as in `sums_itself`.
        sums: as in `sums_itself`.
        gate: shut while they travel, or are queued to streams that know by themselves what is more urgent.
        timeout_s: how long to wait for another rank.
    """

    outlast_backward = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        kind: str,
        sums: str = _AUTO,
        gate: Gate | None,
        timeout_s: float,
    ) -> None:
        self._group, self._gate = group, gate or Gate()
        self._itself = sums_itself(group, device, kind, sums)
        self.by: Transport | None = None
        self._queued: QueuedSums | None = None
        if not self._itself:
            self.by = open_sums_channel(group, device, kind=kind, sums=sums, timeout_s=timeout_s)
            if only_queues(self.by) and device.type == "cuda":
                self._queued = QueuedSums(self.by, self._gate, device)
        self._waits: list[Callable[[], object]] = []

    @property
    def only_starts(self) -> bool:
        """Whether `start` returns at once, so that several pieces can be under way beside other work."""
        return self._itself or self._queued is not None

    def start(self, values: Tensor) -> Callable[[], object]:
        """Add up; on a GPU it is only queued, and other things can be done until `wait`. Several may be under way.

        Returns what waits for this one alone, and for those before it.
        """
        if self._queued is not None:
            self._waits = [self._queued.wait]
            return self._queued.start(values)
        gate = self._gate
        gate.shut(Deadline.DENSE_GRADIENTS)
        if self.by is None:
            work = dist.all_reduce(values, group=self._group, async_op=True)
            assert work is not None
            if values.is_cuda:  # see `_over_group`
                gate.open(Deadline.DENSE_GRADIENTS)
            else:
                work.get_future().then(lambda _: gate.open(Deadline.DENSE_GRADIENTS))
            self._waits.append(work.wait)
            return work.wait
        try:
            values.copy_(start_all_reduce(self.by, values).wait())
        finally:
            gate.open(Deadline.DENSE_GRADIENTS)
        return lambda: None

    def finish(self) -> None:
        """No other will follow soon: queue all that is left to do of those under way."""
        if self._queued is not None:
            self._queued.finish()

    def forget(self) -> None:
        """Somebody waits for each of those under way."""
        self._waits = []
        self.finish()

    def wait(self) -> None:
        """Let the current stream wait for the sums, which are where the values were."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


def _future_of(values: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[values.device] if values.is_cuda else [])


def _done(values: Tensor) -> torch.futures.Future[Tensor]:
    """What DDP is told where somebody else waits for the sum: it would let the stream of the backward wait for it."""
    done = _future_of(values)
    done.set_result(values)
    return done


def _at_the_end(callback: Callable[[], None]) -> None:
    """Of this backward, and before DDP looks at the buckets: it queues its own callback after its hooks."""
    Variable._execution_engine.queue_callback(callback)


def all_reduce_gradients(params: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Add up over the ranks the gradients of parameters that no DDP looks after, all at once; missing ones are zero."""
    params = list(params)
    if ranks.group is None or not params:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
    arrival = trace.arrive("sum item encoder gradients", on_device=flat.is_cuda)
    dist.all_reduce(flat, group=ranks.group)
    if arrival is not None:
        trace.waited(arrival, arrival.mark, on_device=flat.is_cuda)
    for param, grad in lying_in(flat, params):
        param.grad = grad


def in_pieces(
    parameters: Iterable[nn.Parameter],
    most_bytes: float,
    unit_of: Callable[[nn.Parameter], object] | None = None,
) -> list[list[nn.Parameter]]:
    """Parameters of one type after the other, in pieces of so many bytes; one that is larger is a piece of its own.

    Neighbours of one unit, a layer say, stay in one piece of up to twice as much: whoever needs the rest of a unit that
    was cut would wait for what lies behind it in the same piece.
    """
    found: list[list[nn.Parameter]] = []
    room = 0.0
    for part in _inseparable(parameters, most_bytes, unit_of):
        size = sum(param.nbytes for param in part)
        if not found or size > room or part[0].dtype != found[-1][0].dtype:
            found.append([])
            room = most_bytes
        found[-1].extend(part)
        room -= size
    return found


def _inseparable(
    parameters: Iterable[nn.Parameter],
    most_bytes: float,
    unit_of: Callable[[nn.Parameter], object] | None,
) -> Iterator[list[nn.Parameter]]:
    """What is not cut apart: units, or the parameters of one that is too large."""
    if unit_of is None:
        yield from ([param] for param in parameters)
        return
    for _, group in itertools.groupby(parameters, key=lambda param: (unit_of(param), param.dtype)):
        members = list(group)
        if sum(param.nbytes for param in members) <= 2 * most_bytes:
            yield members
        else:
            yield from ([param] for param in members)


def lying_in(flat: Tensor, params: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Gradients that lie one after the other, each with its parameter."""
    each = flat.split([param.numel() for param in params])
    return ((param, grad.view_as(param)) for param, grad in zip(params, each, strict=True))
