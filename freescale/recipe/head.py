"""What the model is trained to predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freescale.errors import ConfigError
from freescale.recipe.reading.keys import extra_keys, key, section_options
from freescale.recipe.requests import KIND as REQUESTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from freescale.data import Examples, RequestExamples, SequenceSource, TaskRule
    from freescale.model import Head
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """What the model is trained to predict."""

    kind: str = key("retrieval", "next item by sampled softmax, or actions as labels", family="head")
    num_negatives: int = key(128, "negatives drawn for each sample", at_least=1)
    temperature: float = key(0.05, "divides the logits of the sampled softmax", at_least=1e-4)
    normalize: bool = key(True, "l2-normalise user and item vectors")
    label_thresholds: tuple[float, ...] = key(
        (3.5,), "ranking: one binary task a threshold, label = action > threshold"
    )
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """A ranking head without tasks."""
    if config.head.kind == "ranking" and not config.head.label_thresholds:
        return ["head.label_thresholds: a ranking head needs at least one"]
    return []


def build_head(config: Config, source: SequenceSource) -> Head:
    """What the model is trained to predict."""
    from freescale.data import outcome_columns
    from freescale.model import check_columns, make_head

    kind = config.head.kind
    head = make_head(kind, dim=config.model.dim, options=section_options(config.head, "head"))
    columns = outcome_columns(source) if kind == REQUESTS else source.features
    check_columns(head, columns, kind=kind, data=source.name)
    return head


def labels_in_words(head: Head, train: Examples) -> str:
    """What a head with thresholds predicts, and how many training targets are positive.

    Raises:
        ConfigError: a threshold or a task gives every training target the same label: there is nothing to learn.
    """
    from freescale import units
    from freescale.data import RequestExamples, label_shares

    if isinstance(train, RequestExamples):
        return f"candidates of requests: {'; '.join(_tasks_in_words(getattr(head, 'tasks', ()), train))}"
    thresholds: tuple[float, ...] = getattr(head, "thresholds", ())
    if not thresholds or "action" not in train.source.features:
        return "next event's label"
    shares, values = label_shares(train, thresholds)
    for threshold, share in zip(thresholds, shares):
        if share in (0.0, 1.0):
            raise _one_label(threshold, share, values)
    tasks = (
        f"action > {x:g} ({units.percent(share)} of the training targets)"
        for x, share in zip(thresholds, shares)
    )
    return f"next event's label: {', '.join(tasks)}"


def _tasks_in_words(tasks: tuple[TaskRule, ...], train: RequestExamples) -> Iterator[str]:
    """Every task, and what share of the candidates it counts is true, or between which numbers they are."""
    from freescale import units
    from freescale.data import task_facts

    for task, facts in zip(tasks, task_facts(train, tasks)):
        if not facts.learnable:
            where = f" where {task.where}" if task.where else ""
            got = f"{facts.counted:,} candidates of training with a label{where}"
            raise ConfigError(
                f"head.tasks: {task.name} has the same label for every training candidate: nothing can be learnt of it",
                got=got + (f", all of them {facts.lowest:g}" if facts.counted else ""),
                allowed="tasks that some candidates differ in",
                next_step=f"change or leave out the task {str(task)!r}",
            )
        share = units.percent(facts.true / facts.counted)
        told = f"{share} true" if task.kind == "binary" else f"{facts.lowest:g} to {facts.highest:g}"
        yield f"{task} ({told})"


def _one_label(threshold: float, share: float, values: npt.NDArray[np.generic]) -> ConfigError:
    """Every training target has the same label."""
    shown = ", ".join(f"{value:g}" for value in values.tolist()[:10]) + (", ..." if len(values) > 10 else "")
    middle = len(values) // 2
    better = "head.kind=retrieval: with one action there is nothing to rank"
    if len(values) > 1:
        better = f"head.label_thresholds={(float(values[middle - 1]) + float(values[middle])) / 2:g}"
    return ConfigError(
        f"head.label_thresholds: {threshold:g} gives every training target the same label, {share:.0f}",
        got=f"actions that occur: {shown}",
        allowed="thresholds that some actions exceed and others do not",
        next_step=better,
    )
