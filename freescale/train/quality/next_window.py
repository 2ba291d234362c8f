"""Test, then train: every window of a log is the test of what was learnt before it, and is learnt afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from freescale.train.log.events import Progress
from freescale.train.quality.evaluate import GivenUpError, GiveUp
from freescale.train.quality.protocol import EvalProtocol
from freescale.train.quality.run_evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class NextWindowProtocol(EvalProtocol):
    """How every window of a log is evaluated.

    Args:
        kept_share: of training targets that repeat an earlier item, as the run measured it when the first window, which
            was deleted since, was there; None: it is there, or nobody knows.
    """

    kept_share: float | None = None

    def words(self, split: str) -> str:
        """What a line of metrics says of how they were measured."""
        ranked = self.labels
        if self.rule is not None:
            ranked = f"full ranking, {'seen filtered' if self.rule.filter_seen else 'seen kept'}"
        return f"{ranked}, {self.split_words}"

    def facts(self) -> dict[str, object]:
        """What a checkpoint and an export keep."""
        return {**super().facts(), **({} if self.kept_share is None else {"repeat_share": self.kept_share})}

    def seen_words(self, asked: str) -> str:
        """What becomes of seen items and why; `asked` is the key as it was set."""
        if self.rule is None or self.repeats is not None:
            return super().seen_words(asked)
        return f"{self.kept_words()} (eval.filter_seen={asked}; the first window is deleted)"


@dataclass(kw_only=True)
class NextWindowEvaluation(Evaluation):
    """The evaluations of a run over a log; there is no best state, the latest is.

    Args:
        begins_at: (steps) -> the window that begins after so many steps, if it is known.
        examples_of: (window) -> its targets among the items known before it, `NextExamples` or `NextRequests`.
        evaluated: the last window that was evaluated; 0: none.
    """

    begins_at: Callable[[int], int | None]
    examples_of: Callable[[int], Any]
    evaluated: int = 0

    def due(self, step: int) -> bool:
        """Whether a window begins here that was not evaluated."""
        return self.pending or (self.begins_at(step) or 0) > self.evaluated

    def validate(self, step: int, progress: Progress, *, give_up: GiveUp = lambda: False) -> bool:
        """Evaluate the window that begins here, if it is there; never the best state so far."""
        window = self.begins_at(step)
        if window is None or window <= self.evaluated:
            self.pending = False
            return False
        self.pending = True
        examples = self.examples_of(window)
        try:
            metrics = self.evaluator.run(examples, give_up=give_up)
        except GivenUpError:
            return False
        self.pending, self.evaluated = False, window
        progress.evaluation(
            step,
            metrics,
            protocol=f"{self.protocol.words('test')}, {examples.words()}",
            popularity=None,
            repeat=None,
            split="next",
            window=window,
            targets=examples.num_targets,
            unknown=examples.num_unknown,
            **self.protocol.seen_facts(),
        )
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**super().state(), "evaluated_window": self.evaluated}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was."""
        super().load_state(state)
        self.evaluated = int(state.get("evaluated_window", 0))
