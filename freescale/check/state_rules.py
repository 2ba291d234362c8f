"""Rules about what code keeps and where it takes random numbers from: the same pass again is the same pass."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from freescale.check.passes import Pass, Subject, distance


def foreign_randomness(subject: Subject) -> Iterator[str]:
    """The same seed gives the same pass, and the generators of Python and numpy are left alone."""
    python, numpy_state = random.getstate(), np.random.get_state()
    one = subject.run(subject.batch)
    drawn = []
    if random.getstate() != python:
        drawn.append("Python's random")
    if not _same_numpy(numpy_state, np.random.get_state()):
        drawn.append("numpy.random")
    if drawn:
        yield f"your code draws from {' and '.join(drawn)}, which no seed of the run reaches: draw from torch"
        return
    if _differ(subject, one, subject.run(subject.batch)):
        yield (
            "two passes of equal objects from one seed differ: something draws numbers that torch's seed does not "
            "reach (a generator of its own, the clock)"
        )


def randomness_by_rank(subject: Subject) -> Iterator[str]:
    """Another seed of torch, as another rank has, gives the same pass."""
    one, other = (subject.run(subject.batch, seed=seed) for seed in (1, 2))
    if _differ(subject, one, other):
        yield (
            "your code draws torch's random numbers, which follow the rank and not the sample: use freescale.Dropout, "
            "or draw from batch.samples['row']"
        )


def hidden_state(subject: Subject) -> Iterator[str]:
    """The same object called again gives the same pass, and so does a new one that was given its tensors."""
    model = subject.fresh()
    first = subject.run(subject.batch, model=model)
    model.zero_grad(set_to_none=True)
    buffers = {name: value.clone() for name, value in subject.model.named_buffers()}
    for name, value in model.named_buffers():  # a buffer that changed is another rule's
        value.copy_(buffers[name])
    again = subject.run(subject.batch, model=model)
    if _differ(subject, first, again):
        yield (
            "the second call of the same object gives another loss: it keeps state outside of parameters and buffers, "
            "which no checkpoint holds"
        )


def changes(subject: Subject) -> Iterator[str]:
    """Parameters, buffers and the batch are after a pass what they were before."""
    model = subject.fresh()
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    rows, indexed, _ = subject.rows_of(subject.batch)
    given = {**indexed.tokens, **indexed.samples, "the item vectors": rows}
    copies = {name: value.detach().clone() for name, value in given.items()}
    # The gathered vectors are the model's own; what must stay are rows and columns.
    subject.learn(model, rows, indexed)
    for name, value in model.state_dict().items():
        if not torch.equal(value, before[name]):
            yield (
                f"{name} changes in a forward: each rank and each micro-batch would change it differently "
                f"({_normalisation(model, name)})"
            )
    for name, value in given.items():
        if not torch.equal(value.detach(), copies[name]):
            yield f"your code changes {name!r} of the batch it was given: work on a copy"


def _normalisation(model: torch.nn.Module, name: str) -> str:
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return "BatchNorm keeps statistics of the batch; use LayerNorm"
    return "compute it from the batch, or make it a parameter"


def _differ(subject: Subject, one: Pass, other: Pass) -> bool:
    """Whether losses or gradients are not the same: bits repeat on a CPU, a GPU may sum in another order."""
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(one.rows, other.rows)]
    pairs += [(one.gradients[name], other.gradients[name]) for name in one.gradients]
    if subject.device.type == "cpu":
        same = torch.equal(one.loss, other.loss)
        return not same or any(not torch.equal(a, b) for a, b in pairs if a is not None and b is not None)
    apart = [distance(a, b, scale=one.scale) for a, b in pairs]
    return max(distance(one.loss, other.loss), *apart) > 1e-9


def _same_numpy(one: object, other: object) -> bool:
    return repr(one) == repr(other)
