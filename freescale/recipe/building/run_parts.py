"""What a run is assembled from, in the order of `recipe.assembly`: what learns, what it learns from, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from freescale.balance import BalancedSampler, Decisions
    from freescale.comm.traffic import ExpertExchange, Gate
    from freescale.data import BatchFeatures, Examples
    from freescale.model import Recommender
    from freescale.pipeline import PostponeShare, Switch
    from freescale.recipe.building.capture import Capture
    from freescale.recipe.building.loading import LoaderProcesses
    from freescale.recipe.building.run_tables import RunTables
    from freescale.train import (
        ContentInput,
        GrowingLog,
        OwnedParameters,
        StepExtension,
        TextInput,
        Timetable,
        WindowTimetable,
    )


class Learner(NamedTuple):
    """What learns: the dense part and the tables.

    Args:
        model: the dense part.
        tables: of rows.
        optimizer: of the dense part.
        owned: parameters that only some ranks have.
        extensions: what else is done in a step.
        gate: lets urgent traffic pass.
        content: vectors or texts of items, where the model has these.
        features: of batches, where they have more than items.
        experts: exchange of tokens between ranks, where experts are spread.
    """

    model: Recommender
    tables: RunTables
    optimizer: torch.optim.Optimizer
    owned: OwnedParameters
    extensions: tuple[StepExtension, ...]
    gate: Gate
    content: ContentInput | TextInput | None
    features: BatchFeatures | None
    experts: ExpertExchange | None


class Samples(NamedTuple):
    """What is learnt from: which samples make a step, who computes them, and for how long.

    Args:
        examples: to train on.
        sampler: deals them out.
        decisions: what it deals by.
        log: where the samples grow.
        timetable: how many steps, and what is due after them.
    """

    examples: Examples
    sampler: BalancedSampler
    decisions: Decisions
    log: GrowingLog | None
    timetable: Timetable | WindowTimetable


class Stages(NamedTuple):
    """How: in which order batches and rows travel, and what of a step waits.

    Args:
        switch: which steps send their ids ahead.
        lr_factor: step -> what learning rates are multiplied with.
        capture: what recorded steps are made of.
        postpone_bytes: that postponed weight gradients may keep; None: none is postponed.
        postponing: decides how much is, where that is tried out.
        processes: that load batches.
    """

    switch: Switch
    lr_factor: Callable[[int], float]
    capture: Capture
    postpone_bytes: int | None
    postponing: PostponeShare | None
    processes: LoaderProcesses
