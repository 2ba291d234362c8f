"""The protocol of heads: what states are trained for, how that is judged, and what serving needs of it.

    @register("head", "mine", options=MyOptions)             # a frozen dataclass, or none
    def make_mine(dim: int, options: MyOptions) -> MyHead: ...

A kind of head is one file (`heads/`). Every head has `needs`, `metric_names` and `loss`. How it is judged follows from
what else it has:

    queries(states), candidates(rows)     full ranking of the catalogue: HR, NDCG, MRR; it can be exported and served
    metrics()                             numbers of its own, beside full ranking or alone
    export_facts()                        what an export keeps, so that the head can be made again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

from torch import Tensor

from freescale import registry
from freescale.data import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.quality.task_quality import AcrossRanks


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a head needs of the data.

    Args:
        negatives: whether training draws negatives for every sample: "negative_index" of a batch.
        columns: columns events must have; a batch then has e.g. "action" and, of the next event, "target_action".
    """

    negatives: bool = False
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LastEvents:
    """What a head's own metrics see of some users: one row a user, at the last event before the target.

    Args:
        states: [B, D] states.
        items: [B, D] vectors of the targets.
        tokens: the batch's token columns there, "target_action" among them where there are actions.
        samples: the batch's sample columns.
        target_rank: [B] how many items of the catalogue stand before the target, `NEVER` where it is not recommended
            at all (seen, and seen items are filtered); None where nothing is ranked.
    """

    states: Tensor
    items: Tensor
    tokens: Mapping[str, Tensor]
    samples: Mapping[str, Tensor]
    target_rank: Tensor | None


class HeadMetrics(Protocol):
    """Numbers of one evaluation, as sums that ranks can add up."""

    @property
    def sums(self) -> Tensor:
        """On the CPU; summed over the ranks in place, each row by itself, before `values` is asked."""

    def update(self, events: LastEvents) -> None:
        """Add some users; there may be none."""

    def values(self) -> Mapping[str, float | None]:
        """The numbers by name; None where the users seen do not define one."""


@runtime_checkable
class MergedMetrics(Protocol):
    """The same, where sums do not do: ranks bring together what they have collected."""

    def update(self, events: LastEvents) -> None:
        """Add some users; there may be none."""

    def merge(self, ranks: AcrossRanks) -> None:
        """Called once by every rank, before `values` is asked."""

    def values(self) -> Mapping[str, float | None]:
        """The numbers by name, the same on every rank; None where the users seen do not define one."""


@runtime_checkable
class RequestMetrics(Protocol):
    """Metrics over the candidates of requests."""

    def update_requests(self, states_KD: Tensor, rows_UD: Tensor, batch: SequenceBatch) -> None:
        """Add the candidates of some requests: one state each, and the item vectors of the batch."""


class Head(Protocol):
    """What states are trained for; an `nn.Module` where it has weights."""

    @property
    def needs(self) -> Needs:
        """What the data must give."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What can decide the best checkpoint, larger being better; the first does unless another is named."""

    def loss(
        self, states_TD: Tensor, rows_UD: Tensor, batch: SequenceBatch, layout: SequenceLayout
    ) -> Tensor:
        """The SUM of the losses of this rank's targets, also where there are none.

        Dividing by the global count is the training step's work, so that the curve does not depend on which rank holds
        which sample.

        Args:
            states_TD: one state a token, perhaps of half precision.
            rows_UD: the unique item vectors of the batch.
            batch: carries "target_index", indices of the next items in `rows_UD`, and what the head needs.
            layout: where the sequences stand.
        """


class RetrievingHead(Head, Protocol):
    """A head that scores items by a dot product, so that a whole catalogue can be ranked and served."""

    def queries(self, states: Tensor) -> Tensor:
        """[B, K] states as they enter the dot product."""

    def candidates(self, rows: Tensor) -> Tensor:
        """[N, K] item vectors as they enter the dot product."""


def retrieves(head: Head) -> TypeGuard[RetrievingHead]:
    """Whether a head can rank the catalogue."""
    return hasattr(head, "queries") and hasattr(head, "candidates")


def scores_candidates(head: Head) -> bool:
    """Whether a head predicts what happens to the candidates of requests."""
    return bool(getattr(head, "takes_requests", False))


def own_metrics(head: Head) -> HeadMetrics | MergedMetrics | None:
    """The head's own metrics before the first user, if it has any."""
    begin = getattr(head, "metrics", None)
    return None if begin is None else cast(HeadMetrics | MergedMetrics, begin())


def export_facts(head: Head, *, kind: str = "", options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an export keeps of a head: at least its name and its options; those of the recipe unless it says itself.

    Raises:
        ConfigError: it cannot be served.
    """
    facts = getattr(head, "export_facts", None)
    if kind.startswith(registry.PYTHON) and not type(head).__module__.startswith("freescale."):
        facts = None  # what it may have inherited would make another head
    if facts is None and kind:
        named = {"name": kind, "options": dict(options or {})}
        facts = lambda: named  # noqa: E731
    if facts is None or not (retrieves(head) or scores_candidates(head)):
        raise ConfigError(
            "only models that retrieve or score candidates can be exported",
            got=type(head).__name__,
            allowed="head.kind=retrieval, head.kind=tasks; of your own those with export_facts(), and queries(states) "
            "and candidates(rows) or takes_requests",
        )
    return dict(facts())


def make_head(kind: str, *, dim: int, options: object = None) -> Head:
    """The head a recipe or an exported manifest names.

    Args:
        kind: e.g. "retrieval" or "ranking".
        dim: width of states and item vectors.
        options: of the kind, or a mapping with the same keys.
    """
    found = registry.find("head", kind)
    return cast(Head, found.make(dim, registry.options_of(found, options)))


def check_columns(head: Head, columns: Collection[str], *, kind: str, data: str) -> None:
    """Refuse data without a column the head needs; `kind` and `data` are their names."""
    missing = [name for name in head.needs.columns if name not in columns]
    if missing:
        raise ConfigError(
            f"head.kind={kind} needs the column {missing[0]!r} in the data",
            got=f"{data} has {', '.join(columns)}",
            next_step=f"prepare the data with it, or use another head: {', '.join(registry.names('head'))}",
        )
