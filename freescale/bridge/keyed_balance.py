"""Balance for loops that feed KeyedJaggedTensors: samples move between ranks, model and trainer stay as they are.

    gloo = dist.new_group(backend="gloo")
    for ready in KJTBalancer(loader, group=gloo, kjt_of=lambda b: b.kjt, dense_of=lambda b: {"label": b.label}):
        losses = model(ready.kjt, ready.dense)                       # one for each sample
        (losses[: ready.num_samples].sum() * ready.scale).backward()

A KeyedJaggedTensor stands feature by feature, and samples move whole: it is turned sample by sample, balanced as any
stream is, and turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.balance import CostModel
from freescale.bridge.jagged import Keyed
from freescale.data import SequenceBatch
from freescale.errors import DataError
from freescale.jagged import offsets_of, spans
from freescale.pipeline import StreamBalancer

B = TypeVar("B")
_LENGTHS, _DENSE = "lengths", "dense."


@dataclass(frozen=True)
class BalancedKJT:
    """One rank's batch after the exchange.

    Args:
        kjt: the features of the samples to compute, of the type that was given.
        dense: what else belongs to each of them.
        num_samples: how many there are. Where this rank has none, `kjt` and `dense` hold one blank sample, without ids
            and with zeros, since an EmbeddingCollection fails without any: take losses[:num_samples].
        global_samples: samples of all ranks together.
        scale: multiplies the summed loss of this rank: ranks / global_samples, since DDP and TorchRec divide the
            gradients by the ranks. The sum over ranks is then the mean over samples, wherever each is computed.
        imbalance_before: largest / mean predicted cost over ranks as the samples arrived.
        imbalance: the same after the exchange.
        moved: share of the samples that changed rank.
    """

    kjt: Any
    dense: Mapping[str, Tensor]
    num_samples: int
    global_samples: int
    scale: float
    imbalance_before: float
    imbalance: float
    moved: float


class KJTBalancer(Generic[B]):
    """Iterates over balanced batches of a loader; the exchange for the next step runs behind the current one.

    Every rank must iterate; as with `StreamBalancer`, a rank whose loader ends early goes on with samples of others.

    Args:
        batches: this rank's, on the CPU.
        group: a gloo group that nothing else uses.
        kjt_of: a batch's features, a KeyedJaggedTensor or `KeyedFeatures`, the same keys in every batch.
        dense_of: what else moves with the samples: tensors with one entry a sample.
        weigh: the features whose lengths say what a sample costs; all of them unless given.
        cost_model: predicts the cost of a sample from its length.
        tolerance: bubble to accept instead of moving more samples.
        ahead: batches kept ready.
    """

    def __init__(
        self,
        batches: Iterable[B],
        *,
        group: dist.ProcessGroup,
        kjt_of: Callable[[B], Keyed],
        dense_of: Callable[[B], Mapping[str, Tensor]] | None = None,
        weigh: str | Sequence[str] | None = None,
        cost_model: CostModel | None = None,
        tolerance: float = 0.01,
        ahead: int = 1,
    ) -> None:
        self._batches, self._kjt_of = batches, kjt_of
        self._dense_of = dense_of or (lambda batch: {})
        self._weigh = [weigh] if isinstance(weigh, str) else weigh
        self._like: Keyed | None = None
        self._num_ranks = dist.get_world_size(group)
        self._balancer = StreamBalancer(
            self._by_sample(),
            group=group,
            cost_model=cost_model,
            tolerance=tolerance,
            ahead=ahead,
            weigh=self._lengths,
            min_count=1,
        )

    def __iter__(self) -> Iterator[BalancedKJT]:
        """Balanced batches until every rank's loader has ended."""
        for ready in self._balancer:
            assert self._like is not None
            batch = ready.batch if len(ready.batch) else _blank(ready.batch)
            kjt, dense = from_samples(batch, like=self._like)
            yield BalancedKJT(
                kjt=kjt,
                dense=dense,
                num_samples=len(ready.batch),
                global_samples=ready.global_samples,
                scale=self._num_ranks / ready.global_samples,
                imbalance_before=ready.imbalance_before,
                imbalance=ready.imbalance,
                moved=ready.moved,
            )

    def _by_sample(self) -> Iterator[SequenceBatch]:
        for batch in self._batches:
            kjt = self._kjt_of(batch)
            if self._like is not None and list(kjt.keys()) != list(self._like.keys()):
                raise DataError(
                    "batches must have the same features in the same order",
                    got=", ".join(kjt.keys()),
                    allowed=", ".join(self._like.keys()),
                )
            self._like = kjt
            yield to_samples(kjt, self._dense_of(batch))

    def _lengths(self, batch: SequenceBatch) -> Tensor:
        if self._weigh is None:
            return batch.lengths
        assert self._like is not None
        keys = list(self._like.keys())
        missing = [name for name in self._weigh if name not in keys]
        if missing:
            raise DataError(
                "weigh names a feature that batches do not have", got=missing[0], allowed=", ".join(keys)
            )
        columns = [keys.index(name) for name in self._weigh]
        return batch.samples[_LENGTHS][:, columns].sum(1)


def to_samples(kjt: Keyed, dense: Mapping[str, Tensor] | None = None) -> SequenceBatch:
    """Features that stand one after the other, sample by sample: the ids of all features of the first sample first."""
    keys, lengths = list(kjt.keys()), kjt.lengths().long()
    if len(keys) == 0 or len(lengths) % len(keys):
        raise DataError(
            "features must have equally many samples: variable batch sizes cannot be balanced",
            got=f"{len(lengths)} lengths of {len(keys)} features",
        )
    per_key = lengths.view(len(keys), -1)
    order = _turned(per_key)
    tokens = {"values": kjt.values()[order]}
    if (weights := kjt.weights_or_none()) is not None:
        tokens["weights"] = weights[order]
    counts = per_key.sum(0)
    columns = {f"{_DENSE}{name}": values for name, values in (dense or {}).items()}
    for name, values in columns.items():
        if len(values) != len(counts):
            raise DataError(
                f"{name.removeprefix(_DENSE)!r} must have one entry a sample",
                got=len(values),
                allowed=len(counts),
            )
    return SequenceBatch(
        offsets=torch.from_numpy(offsets_of(counts.numpy())),
        tokens=tokens,
        samples={_LENGTHS: per_key.T.contiguous(), **columns},
    )


def from_samples(batch: SequenceBatch, *, like: Keyed) -> tuple[Any, dict[str, Tensor]]:
    """The way back: features of the type and with the keys of `like`, and what else belongs to the samples."""
    per_sample = batch.samples[_LENGTHS]
    order = _turned(per_sample)
    weights = batch.tokens.get("weights")
    given = like.lengths()
    make: Callable[..., Any] = type(like)
    kjt = make(
        keys=list(like.keys()),
        values=batch.tokens["values"][order],
        lengths=per_sample.T.reshape(-1).to(given.dtype),
        **({} if weights is None else {"weights": weights[order]}),
    )
    dense = {
        name.removeprefix(_DENSE): values for name, values in batch.samples.items() if name.startswith(_DENSE)
    }
    return kjt, dense


def _turned(lengths: Tensor) -> Tensor:
    """[T] where the values of a [rows, columns] table of lists, laid out by rows, stand when laid out by columns."""
    starts = lengths.reshape(-1).cumsum(0) - lengths.reshape(-1)
    index, _ = spans(starts.view(lengths.shape).T.reshape(-1).numpy(), lengths.T.reshape(-1).numpy())
    return torch.from_numpy(index)


def _blank(batch: SequenceBatch) -> SequenceBatch:
    """One sample without ids, with zeros for all that is known of it."""
    samples = {name: values.new_zeros(1, *values.shape[1:]) for name, values in batch.samples.items()}
    return SequenceBatch(offsets=torch.zeros(2, dtype=torch.int64), tokens=batch.tokens, samples=samples)
