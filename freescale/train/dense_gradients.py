"""Dense gradients summed over the ranks, bucket by bucket, under the backward."""

# No postponed annotations here: DDP looks at the types of its communication hook.
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from freescale.comm.local_sockets import LocalTransport
from freescale.comm.transport import make_transport

Hook = Callable[[None, GradBucket], torch.futures.Future[Tensor]]


def reduced_in_backward(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    timeout_s: float = 600.0,
    handed_over: Callable[[], None] = lambda: None,
) -> DistributedDataParallel:
    """DDP whose buckets are summed, not averaged: the loss is already divided by the global count.

    `handed_over` is called for every bucket that this rank is ready to add up.
    """
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    transport = make_transport(group, device=next(model.parameters()).device, timeout_s=timeout_s)
    hook = _over_sockets(transport) if isinstance(transport, LocalTransport) else _over_group(group)
    wrapped.register_comm_hook(None, _reported(hook, handed_over))
    return wrapped


def _reported(hook: Hook, handed_over: Callable[[], None]) -> Hook:
    def watched(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        handed_over()
        return hook(state, bucket)

    return watched


def _over_group(group: dist.ProcessGroup) -> Hook:
    def add_up(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    return add_up


def _over_sockets(transport: LocalTransport) -> Hook:
    """Without gloo's threads: 12.5 ms instead of 13.5 for a step on two ranks and two cores with 17 KB to add up."""

    def add_up(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        arriving = transport.start_sum(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        # At the end of the backward, and before DDP looks at the bucket: DDP queues its own callback after its hooks.
        Variable._execution_engine.queue_callback(lambda: done.set_result(arriving.wait()))
        return done

    return add_up
