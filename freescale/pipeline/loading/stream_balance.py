"""Balance a stream whose lengths nobody knows beforehand: exchange lengths, plan, move only the samples that must move.

Every rank reads its own part of the stream. One step ahead of the training, in a thread with a CPU group of its own:

    read my batch ──> all lengths to all ranks ──> same plan everywhere ──> all-to-all of the moved samples ──> queue

The union of the ranks' batches, the global batch, is untouched: divide the summed loss by the global count and the
curve stays the same.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.balance import CostModel, FloatArray, IntArray, min_moves
from freescale.comm.transports import make_transport
from freescale.data import SequenceBatch
from freescale.jagged import offsets_of
from freescale.kernels.runtime import start_thread


@dataclass(frozen=True)
class BalancedBatch:
    """One rank's batch after the exchange.

    Args:
        batch: the samples to compute.
        global_samples: samples of all ranks together.
        global_tokens: tokens of all ranks together; divide the summed loss by it.
        imbalance_before: largest / mean predicted cost over ranks as the samples arrived.
        imbalance: the same after the exchange.
        moved: share of the samples that changed rank.
    """

    batch: SequenceBatch
    global_samples: int
    global_tokens: int
    imbalance_before: float
    imbalance: float
    moved: float


class StreamBalancer:
    """Iterates over balanced batches of a stream; the exchange for the next step runs behind the current one.

    Every rank must iterate. A rank whose stream ends early goes on with samples of the others; the iteration ends
    when all streams have ended. An empty batch is not the end of a stream; where those of all ranks are empty, there
    is nothing to learn from, and they are left out.

    Args:
        batches: this rank's batches, on the CPU.
        group: a gloo group that nothing else uses.
        cost_model: predicts the cost of a sample from its length.
        tolerance: bubble to accept instead of moving more samples.
        ahead: batches kept ready.
        transport: how samples travel.
        weigh: [B] whole numbers that stand for the lengths of a batch's samples where their cost is predicted; all
            their tokens unless given.
        min_count: samples that every rank has at least, where there are as many.
    """

    def __init__(
        self,
        batches: Iterable[SequenceBatch],
        *,
        group: dist.ProcessGroup,
        cost_model: CostModel | None = None,
        tolerance: float = 0.01,
        ahead: int = 1,
        transport: str = "collective",
        weigh: Callable[[SequenceBatch], Tensor] | None = None,
        min_count: int = 0,
    ) -> None:
        self._batches = batches
        self._transport = make_transport(group, kind=transport)
        self._group = group
        self._cost_model = cost_model or CostModel.default()
        self._tolerance = tolerance
        self._ahead = ahead
        self._weigh = weigh or (lambda batch: batch.lengths)
        self._min_count = min_count

    def __iter__(self) -> Iterator[BalancedBatch]:
        """Balanced batches until every rank's stream has ended."""
        ready: queue.Queue[BalancedBatch | BaseException | None] = queue.Queue(maxsize=self._ahead)
        start_thread(self._work, ready)
        while True:
            item = ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self, ready: queue.Queue[BalancedBatch | BaseException | None]) -> None:
        try:
            like: SequenceBatch | None = None
            batches = iter(self._batches)
            while True:
                mine = next(batches, None)
                like = mine if mine is not None else like
                balanced = self._balance(mine, like)
                if balanced is None or balanced.global_samples:
                    ready.put(balanced)
                if balanced is None:
                    return
        except BaseException as error:
            ready.put(error)

    def _balance(self, mine: SequenceBatch | None, like: SequenceBatch | None) -> BalancedBatch | None:
        """One exchange; None when the streams of all ranks have ended."""
        sizes = _gather_sizes(None if mine is None else self._sizes(mine), self._group)
        if all(one is None for one in sizes):
            return None
        if mine is None and like is not None:
            mine = like.select([])
        if mine is None:
            raise ValueError("the stream of this rank was empty from the start: it cannot know the features")
        counts = [0 if one is None else len(one) for one in sizes]
        flat, weighed = np.concatenate([one for one in sizes if one is not None]).T
        owner = np.repeat(np.arange(len(counts)), counts)
        costs = self._cost_model.cost(weighed)
        new = min_moves(costs, owner, len(counts), tolerance=self._tolerance, min_count=self._min_count)
        return BalancedBatch(
            batch=self._exchange(mine, flat, owner, new),
            global_samples=len(flat),
            global_tokens=int(flat.sum()),
            imbalance_before=_imbalance(costs, owner, len(counts)),
            imbalance=_imbalance(costs, new, len(counts)),
            moved=float((owner != new).mean()) if len(owner) else 0.0,
        )

    def _sizes(self, batch: SequenceBatch) -> Tensor:
        """[B, 2] tokens of each sample, and those its cost is predicted from."""
        return torch.stack([batch.lengths, self._weigh(batch).cpu().long()], dim=1)

    def _exchange(
        self, mine: SequenceBatch, lengths: IntArray, owner: IntArray, new: IntArray
    ) -> SequenceBatch:
        """Send my samples to their new ranks; what stays goes the same way without touching the wire."""
        if mine.items:
            raise ValueError(
                "what is known of items stands once a batch: it cannot move with some of its samples"
            )
        rank, num_ranks = self._transport.rank, self._transport.num_ranks
        first = int(np.searchsorted(owner, rank))
        here = new[first : first + len(mine)]
        leaving = mine.select(np.argsort(here, kind="stable").tolist())
        to = [np.flatnonzero(here == other) + first for other in range(num_ranks)]
        coming = [np.flatnonzero((owner == other) & (new == rank)) for other in range(num_ranks)]
        send, receive = [len(part) for part in to], [len(part) for part in coming]
        send_tokens = [int(lengths[part].sum()) for part in to]
        receive_tokens = [int(lengths[part].sum()) for part in coming]
        arrived = np.concatenate([lengths[part] for part in coming]).astype(np.int64)
        offsets = torch.from_numpy(offsets_of(arrived))
        return SequenceBatch(
            offsets=offsets,
            tokens={n: self._move(v, send_tokens, receive_tokens) for n, v in leaving.tokens.items()},
            samples={n: self._move(v, send, receive) for n, v in leaving.samples.items()},
            targets=None
            if leaving.targets is None
            else self._move(leaving.targets.to(leaving.device), send, receive).cpu(),
        )

    def _move(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._transport.start(values, send=send, receive=receive).wait()


def _gather_sizes(mine: Tensor | None, group: dist.ProcessGroup) -> list[IntArray | None]:
    """What is known of the samples of every rank's batch; None from a rank whose stream has ended."""
    num_ranks = dist.get_world_size(group)
    count = torch.tensor([-1 if mine is None else len(mine)])
    counts = [torch.empty_like(count) for _ in range(num_ranks)]
    dist.all_gather(counts, count, group=group)
    sizes = [int(one) for one in counts]
    padded = torch.zeros(max(1, *sizes), 2, dtype=torch.int64)
    if mine is not None:
        padded[: len(mine)] = mine
    everybody = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(everybody, padded, group=group)
    return [None if size < 0 else one[:size].numpy() for one, size in zip(everybody, sizes)]


def _imbalance(costs: FloatArray, owner: IntArray, num_ranks: int) -> float:
    loads = np.bincount(owner, weights=costs, minlength=num_ranks)
    return float(loads.max() / loads.mean()) if loads.mean() > 0 else 1.0
