"""check_model: every rule about encoders and heads, tried on real samples in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from freescale.check import apart_rules, state_rules
from freescale.check.passes import BadOutputError, Subject, choose_batch
from freescale.check.report import CheckReport, Violation
from freescale.data import Examples
from freescale.errors import in_one_line
from freescale.model import Recommender, drawn_by_rank

Rule = Callable[[Subject], Iterator[str]]

RUNS = "it runs: states [T, D] from the encoder, one number from the head"
# What must hold before passes can be compared at all.
REPEATABLE: dict[str, Rule] = {
    "random numbers come from torch alone": state_rules.foreign_randomness,
    "random numbers follow the sample, not the rank": state_rules.randomness_by_rank,
    "state is in parameters and buffers only": state_rules.hidden_state,
    "a forward changes nothing": state_rules.changes,
}
COMPARED: dict[str, Rule] = {
    "no sample looks at another": apart_rules.mixed_states,
    "the loss is a sum": apart_rules.no_sum,
    "a state sees no later event": apart_rules.peeking,
    "every parameter gets a gradient": apart_rules.unused,
    "histories without events pass": apart_rules.empty_histories,
}
# What can only go wrong in the same ways as those above, or in ways nobody has thought of.
TOGETHER: dict[str, Rule] = {
    "steps in parts are steps as a whole, saved and loaded in between": apart_rules.steps_in_parts,
}


def check_model(
    make_model: Callable[[], Recommender], examples: Examples, *, dim: int, device: torch.device
) -> CheckReport:
    """Try every rule on a few real samples, in double precision.

    Args:
        make_model: gives a model with its first weights, a new one every time.
        examples: training samples.
        dim: width of item vectors.
        device: where to compute.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return _check(make_model, examples, dim=dim, device=device)


def _check(
    make_model: Callable[[], Recommender], examples: Examples, *, dim: int, device: torch.device
) -> CheckReport:
    model = make_model().without_items()
    batch = choose_batch(examples)
    subject = Subject(model, batch, dim=dim, device=device)
    skipped: tuple[tuple[str, str], ...] = ()
    sentence = _why_not(subject)
    if sentence is not None:
        single = Subject(model, batch, dim=dim, device=device, dtype=torch.float32)
        if _why_not(single) is not None:
            report = CheckReport((RUNS,), (Violation(RUNS, sentence),))
            return report + _not_tried(REPEATABLE | COMPARED | TOGETHER, "it does not run yet")
        subject = single
        skipped = (("double precision", f"{sentence}; compared in single precision instead"),)
    report = CheckReport((RUNS,), (), skipped)
    torch_dropout = [Violation(list(REPEATABLE)[1], text) for text in drawn_by_rank(model)]
    first = _tried(REPEATABLE, subject)
    report += CheckReport(first.rules, (*torch_dropout, *first.violations))
    if not first.ok:
        return report + _not_tried(COMPARED | TOGETHER, "passes that do not repeat cannot be compared")
    second = _tried(COMPARED, subject)
    if not second.ok:
        return report + second + _not_tried(TOGETHER, "a rule above does not hold")
    return report + second + _tried(TOGETHER, subject)


def _not_tried(rules: Iterable[str], reason: str) -> CheckReport:
    return CheckReport(skipped=tuple((rule, reason) for rule in rules))


def _tried(rules: dict[str, Rule], subject: Subject) -> CheckReport:
    violations = []
    for rule, find in rules.items():
        try:
            violations += [Violation(rule, sentence) for sentence in find(subject)]
        except BadOutputError as error:
            violations.append(Violation(rule, str(error)))
        except Exception as error:
            violations.append(Violation(rule, f"your code failed where it was tried: {_in_words(error)}"))
    return CheckReport(tuple(rules), tuple(violations))


def _why_not(subject: Subject) -> str | None:
    """Why a pass over the whole batch fails, if it does."""
    try:
        subject.run(subject.batch)
    except BadOutputError as error:
        return str(error)
    except Exception as error:
        lengths = subject.batch.lengths.tolist()
        return (
            f"your code failed on a batch of {len(lengths)} histories of {lengths} events with item vectors of width "
            f"{subject.table.shape[1]} (model.dim): {_in_words(error)}"
        )
    return None


def _in_words(error: Exception) -> str:
    """An error as one line, and where it was raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if "/freescale/" not in frame.filename and "/torch/" not in frame.filename
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{in_one_line(error)}{where}"
