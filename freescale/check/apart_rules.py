"""Rules that compare a batch with its parts: whoever computes a sample, and beside which others, is all the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from freescale.check.passes import SEED, Pass, Subject, distance, keyed, summed
from freescale.data import SequenceBatch
from freescale.errors import in_one_line
from freescale.kernels import SequenceLayout
from freescale.model import Recommender

_LATE_COLUMNS_READ = ("target_time",)  # a request comes when the next event happens, so its time is known
_LEARNING_RATE = 0.05


def mixed_states(subject: Subject) -> Iterator[str]:
    """The states of a sample are the same alone as beside others."""
    norms = _batch_norms(subject.model.encoder, "encoder")
    if norms:
        yield f"{', '.join(norms)} mixes the samples of a batch (BatchNorm): use LayerNorm"
        return
    whole = subject.run(subject.batch).states
    alone = torch.cat([subject.run(single).states for single in subject.singles()])
    if distance(whole, alone) <= subject.tolerance:
        return
    if _only_longer_ones_matter(subject):
        yield (
            "the states of a history change when a longer one is in its batch: padding leaks in; mask it, or divide by "
            "the history's own length"
        )
    else:
        yield "the states of a history change with the other histories of its batch: no sample may look at another"


def no_sum(subject: Subject) -> Iterator[str]:
    """With the same states, the loss and the gradients of a batch are the sums over its samples."""
    norms = _batch_norms(subject.model.head, "head")
    if norms:
        yield f"{', '.join(norms)} mixes the samples of a batch (BatchNorm): use LayerNorm"
        return
    singles = subject.singles()
    states = _some_states(subject)
    cut = states.split(subject.batch.lengths.tolist())
    parts = [_head_pass(subject, single, given) for single, given in zip(singles, cut)]
    whole = _head_pass(subject, subject.batch, states)
    total = torch.stack([part.loss for part in parts]).sum()
    apart = [distance(whole.rows, summed([part.rows for part in parts]), scale=whole.scale)]
    for name, grad in whole.gradients.items():
        apart.append(distance(grad, summed([part.gradients[name] for part in parts]), scale=whole.scale))
    if max(distance(whole.loss, total), *apart) <= subject.tolerance:
        return
    tokens = [single.num_tokens for single in singles]
    if _is_mean(whole.loss, [part.loss for part in parts], tokens, subject.tolerance):
        yield "your loss is a mean over targets: return the sum, the step divides by the global number of targets"
    elif _is_mean(whole.loss, [part.loss for part in parts], [1] * len(parts), subject.tolerance):
        yield "your loss is a mean over samples: return the sum, the step divides by the global number of targets"
    else:
        yield (
            "the loss of a batch is not the sum over its samples: other samples' items serve as negatives, or it is "
            "divided by something of the batch; draw negatives by the sample (batch.samples['negative_index'])"
        )


def peeking(subject: Subject) -> Iterator[str]:
    """Another last event, and other targets, leave the states before as they are."""
    batch = subject.indexed()
    states = subject.states(batch)
    last = (batch.offsets[1:] - 1)[batch.lengths > 0].to(subject.device)
    changed = batch.with_tokens(
        **{
            name: _other(values, last, subject)
            for name, values in batch.tokens.items()
            if not name.startswith("target") and "time" not in name
        }
    )
    earlier = torch.ones(len(states), dtype=torch.bool, device=subject.device)
    earlier[last] = False
    if distance(subject.states(changed)[earlier], states[earlier]) > 1e-3 * subject.tolerance:
        yield (
            "a state changes with an event that comes after it: it sees the future it is to predict (use a causal "
            "mask, no bidirectional layer, nothing pooled over the whole history)"
        )
    everywhere = torch.arange(len(states), device=subject.device)
    targets = {
        name: _other(values, everywhere, subject)
        for name, values in batch.tokens.items()
        if name.startswith("target") and name not in _LATE_COLUMNS_READ
    }
    if distance(subject.states(batch.with_tokens(**targets)), states) > 1e-3 * subject.tolerance:
        yield "your encoder reads the target it is to predict: of the next event only target_time may be known"


def unused(subject: Subject) -> Iterator[str]:
    """Every parameter gets a gradient, also in the smallest batch; else ranks would wait for each other forever."""
    whole = subject.run(subject.batch)
    missing = [name for name, grad in whole.gradients.items() if grad is None]
    if missing:
        yield f"{', '.join(missing)} gets no gradient: use it, remove it, or set requires_grad_(False)"
    if whole.rows is None:
        yield "no gradient reaches the item vectors: the loss must depend on states or rows"
    shortest = min(subject.singles(), key=lambda single: single.num_tokens)
    small = subject.run(shortest)
    sometimes = [name for name, grad in small.gradients.items() if grad is None and name not in missing]
    if sometimes:
        yield (
            f"{', '.join(sometimes)} gets no gradient in a batch of one history of {shortest.num_tokens} events: a "
            "rank may have just that; use every parameter in every batch, with a factor of zero if need be"
        )


def empty_histories(subject: Subject) -> Iterator[str]:
    """A history without events among others changes neither loss nor states."""
    batch, at = subject.batch, len(subject.batch) // 2
    index = [*range(at), 0, *range(at, len(batch))]
    offsets = torch.cat([batch.offsets[: at + 1], batch.offsets[at:]])
    samples = {name: values[index] for name, values in batch.samples.items()}
    with_empty = SequenceBatch(offsets=offsets, tokens=batch.tokens, samples=samples)
    try:
        got = subject.run(with_empty)
    except Exception as error:
        yield f"your code fails on a batch with a history without events: {in_one_line(error)}"
        return
    without = subject.run(batch)
    if distance(got.loss, without.loss) > subject.tolerance:
        yield "a history without events changes the loss: it must add nothing"


def steps_in_parts(subject: Subject) -> Iterator[str]:
    """Four steps as a whole are four steps in two parts, whose tensors move to a new object in the middle."""
    whole, parts = subject.fresh(), subject.fresh()
    batch = subject.batch
    halves = [batch.select(range(0, len(batch), 2)), batch.select(range(1, len(batch), 2))]
    for step in range(4):
        losses = [
            _step(subject, whole, [batch], seed=step),
            _step(subject, parts, [half for half in halves if len(half)], seed=step),
        ]
        if distance(*losses) > 100 * subject.tolerance:
            yield (
                f"a batch in two parts gives another loss than the whole at step {step + 1}: what the code keeps or "
                "how it divides depends on how often it is called"
            )
            return
        if step == 1:
            saved = {name: value.clone() for name, value in parts.state_dict().items()}
            parts = subject.fresh()
            parts.load_state_dict(saved)


def _step(subject: Subject, model: Recommender, batches: Sequence[SequenceBatch], *, seed: int) -> Tensor:
    """One step of plain descent over parts of a batch; the sum of their losses."""
    tokens = sum(batch.num_tokens for batch in batches)
    model.zero_grad(set_to_none=True)
    losses = [subject.run(batch, model=model, seed=seed).loss for batch in batches]
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=_LEARNING_RATE / max(1, tokens))
    return torch.stack(losses).sum()


def _some_states(subject: Subject) -> Tensor:
    """One state a token that no encoder has made, so that a head is judged by itself."""
    drawn = torch.Generator().manual_seed(SEED)
    states = torch.randn(
        subject.batch.num_tokens, subject.table.shape[1], generator=drawn, dtype=torch.float64
    )
    return states.to(device=subject.device, dtype=subject.dtype)


def _head_pass(subject: Subject, batch: SequenceBatch, states: Tensor) -> Pass:
    """Only the head, over given states; `gradients` are those of the head."""
    head = copy.deepcopy(subject.model.head)
    rows, indexed, places = subject.rows_of(batch)
    layout = SequenceLayout(indexed.offsets, device=subject.device)
    torch.manual_seed(1)
    with keyed(indexed):
        loss = head.loss(states.clone().requires_grad_(), rows, indexed, layout)
    loss.backward()
    spread = None
    if rows.grad is not None:
        spread = torch.zeros_like(subject.table).index_copy(0, places, rows.grad)
    named = head.named_parameters() if isinstance(head, nn.Module) else ()
    gradients = {name: param.grad for name, param in named if param.requires_grad}
    return Pass(loss.detach(), states, gradients, spread)


def _only_longer_ones_matter(subject: Subject) -> bool:
    """Whether a sample keeps its states beside a shorter one and not beside a longer one."""
    singles = sorted(range(len(subject.batch)), key=lambda n: int(subject.batch.lengths[n]))
    short, middle, long = singles[0], singles[len(singles) // 2], singles[-1]
    lengths = subject.batch.lengths
    if not lengths[short] < lengths[middle] < lengths[long]:
        return False
    alone = subject.run(subject.batch.select([middle])).states
    beside = {n: subject.run(subject.batch.select([middle, n])).states[: len(alone)] for n in (short, long)}
    return distance(beside[short], alone) <= subject.tolerance < distance(beside[long], alone)


def _batch_norms(part: object, name: str) -> list[str]:
    if not isinstance(part, nn.Module):
        return []
    kind = nn.modules.batchnorm._BatchNorm
    found = [inner for inner, each in part.named_modules() if isinstance(each, kind) and each.training]
    return [f"{name}.{inner}".rstrip(".") for inner in found]


def _is_mean(whole: Tensor, parts: Sequence[Tensor], counts: Sequence[int], tolerance: float) -> bool:
    """Whether a loss times its count adds up, while the loss does not."""
    weighted = torch.stack([part * count for part, count in zip(parts, counts)]).sum()
    return distance(whole * sum(counts), weighted) <= tolerance


def _other(values: Tensor, where: Tensor, subject: Subject) -> Tensor:
    """A column with another value at some places; indices stay within the table."""
    changed = values.clone()
    if values.dtype == torch.bool:
        changed[where] = ~values[where]
    elif values.is_floating_point():
        changed[where] = values[where] + 1
    else:
        changed[where] = (values[where] + 1) % len(subject.ids)
    return changed
