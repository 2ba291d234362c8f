"""How good a run is: on what it is evaluated, which state was the best so far, and when to stop hoping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freescale.data import Examples
from freescale.train.log.events import Progress
from freescale.train.quality.evaluate import Evaluator, GivenUpError, GiveUp


@dataclass(kw_only=True)
class Evaluation:
    """The evaluations of a run, and what is known from those behind it.

    Args:
        evaluator: ranks items for users.
        valid: validation examples.
        test: test examples.
        metric: what decides the best state.
        protocol: how it is measured, in words.
        popularity: metrics of the popularity baseline on the validation and test targets.
        max_users: users of the evaluations during training; None: all.
        patience: evaluations without a better one before stopping; None: never.
        best: metric, value and step of the best state so far; empty before the first.
        since_best: evaluations since then.
        pending: whether an evaluation was given up, to be made up for where the run goes on.
    """

    evaluator: Evaluator
    valid: Examples
    test: Examples
    metric: str
    protocol: str
    popularity: Mapping[str, Mapping[str, float]]
    max_users: int | None
    patience: int | None
    best: dict[str, Any] = field(default_factory=dict)
    since_best: int = 0
    pending: bool = False

    @property
    def out_of_patience(self) -> bool:
        """Whether the last evaluations brought nothing better."""
        return self.patience is not None and self.since_best >= self.patience

    def validate(self, step: int, progress: Progress, *, give_up: GiveUp = lambda: False) -> bool:
        """Evaluate on the validation targets; True if this is the best state so far."""
        self.pending = True
        try:
            metrics = self.evaluator.run(self.valid, max_users=self.max_users, give_up=give_up)
        except GivenUpError:
            return False
        self.pending = False
        self._tell(step, metrics, progress, split="valid")
        value = metrics.get(self.metric)
        improved = value is not None and value > self.best.get("value", float("-inf"))
        if improved:
            self.best = {"metric": self.metric, "value": value, "step": step}
        self.since_best = 0 if improved else self.since_best + 1
        return improved

    def final(self, step: int, progress: Progress, *, give_up: GiveUp = lambda: False) -> dict[str, Any]:
        """Evaluate on the test targets; what the summary of the run says about it, or GivenUpError."""
        metrics = self.evaluator.run(self.test, give_up=give_up)
        self._tell(step, metrics, progress, split="test")
        popularity = self.popularity.get("test")
        shown = "hr@10" if "hr@10" in metrics else self.metric
        return {
            "best_metric": f"test {shown}",
            "best_value": metrics[shown],
            "best_step": self.best.get("step", step),
            "popularity": None if popularity is None else popularity.get(shown),
            "test": metrics,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "best": self.best,
            "evaluations_since_best": self.since_best,
            "evaluation_pending": self.pending,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was."""
        self.best = dict(state["best"])
        self.since_best = int(state["evaluations_since_best"])
        self.pending = bool(state.get("evaluation_pending", False))

    def forget_best(self) -> None:
        """The best state so far is gone: the best is the best from here on."""
        self.best, self.since_best = {}, 0

    def _tell(self, step: int, metrics: Mapping[str, Any], progress: Progress, *, split: str) -> None:
        progress.evaluation(
            step, metrics, popularity=self.popularity.get(split), protocol=self.protocol, split=split
        )
