"""How good a run is: on what it is evaluated, which state was the best so far, and when to stop hoping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from freescale.comm.world import from_first
from freescale.data import Examples, Split
from freescale.trace import POPULARITY, REPEAT, is_better, numeric_fields
from freescale.train.log.events import Progress
from freescale.train.quality.evaluate import Evaluator, GivenUpError, GiveUp
from freescale.train.quality.protocol import EvalProtocol


class Judge(Protocol):
    """Decides at evaluations whether a run goes on; rank 0 asks it, and all ranks hear the answer.

    A run that is resumed tells it the evaluations behind it again, in their order, and goes on all the same.
    """

    def decide(self, event: dict[str, Any]) -> str | None:
        """Why to stop after this evaluation of validation targets, in words; None to go on."""


@dataclass(kw_only=True)
class Evaluation:
    """The evaluations of a run, and what is known from those behind it.

    Args:
        evaluator: ranks items for users.
        valid: validation examples.
        test: test examples.
        metric: what decides the best state.
        protocol: how it is measured.
        popularity: metrics of recommending what is popular, on the validation and test targets.
        repeat: metrics of recommending a user's own items again, on the same; none where seen items are filtered.
        patience: evaluations without a better one before stopping; None: never.
        stop_at: value of the metric that is good enough; None: none is.
        best: metric, value and step of the best state so far; empty before the first.
        since_best: evaluations since then.
        pending: whether an evaluation was given up, to be made up for where the run goes on.
        notices: what whoever started the run should know of it.
        judge: somebody else who may end the run; only rank 0's is asked.
        verdict: why it did.
    """

    evaluator: Evaluator
    valid: Examples
    test: Examples
    metric: str
    protocol: EvalProtocol
    popularity: Mapping[str, Mapping[str, float]]
    repeat: Mapping[str, Mapping[str, float]]
    patience: int | None
    stop_at: float | None = None
    best: dict[str, Any] = field(default_factory=dict)
    since_best: int = 0
    pending: bool = False
    notices: list[str] = field(default_factory=list)
    judge: Judge | None = None
    verdict: str | None = None

    @property
    def out_of_patience(self) -> bool:
        """Whether the last evaluations brought nothing better, one was good enough, or the judge has seen enough."""
        return self.why_over is not None

    @property
    def why_over(self) -> str | None:
        """Why the run ends before its last step, in words; None where it goes on."""
        if self.verdict is not None:
            return f"the judge ends the run: {self.verdict}"
        best = f"{self.metric} {self.best['value']:.4f} at step {self.best['step']:,}" if self.best else ""
        if self.good_enough:
            return f"run.stop_at={self.stop_at:g} is reached: {best}"
        if self.patience is None or self.since_best < self.patience:
            return None
        past = f"{self.since_best:,} evaluations" if self.since_best > 1 else "one evaluation"
        return f"nothing better in {past} (run.patience={self.patience}){'; best: ' if best else ''}{best}"

    @property
    def good_enough(self) -> bool:
        """Whether the best state is as good as was asked for."""
        best = self.best.get("value")
        if best is None or self.stop_at is None:
            return False
        return bool(best == self.stop_at or is_better(self.metric, best, self.stop_at))

    def due(self, step: int) -> bool:
        """Whether an evaluation is to be made up for before the step after this many."""
        return self.pending

    def validate(self, step: int, progress: Progress, *, give_up: GiveUp = lambda: False) -> bool:
        """Evaluate on the validation targets; True if this is the best state so far."""
        self.pending = True
        try:
            metrics = self.evaluator.run(self.valid, max_users=self.protocol.max_users, give_up=give_up)
        except GivenUpError:
            return False
        self.pending = False
        self._tell(step, metrics, progress, split="valid")
        value = metrics.get(self.metric)
        improved = value is not None and is_better(self.metric, value, self.best.get("value"))
        if improved:
            self.best = {"metric": self.metric, "value": value, "step": step}
        self.since_best = 0 if improved else self.since_best + 1
        if self.judge is not None:
            self.verdict = self._ask(self.judge, judged_event({"step": step, "split": "valid", **metrics}))
        if (why := self.why_over) is not None:
            progress.notice(step, why)
        return improved

    def _ask(self, judge: Judge, event: dict[str, Any]) -> str | None:
        """What rank 0's judge decides, on all ranks."""
        return from_first(lambda: judge.decide(event), ranks=self.evaluator.ranks, what="ask the judge")

    def final(
        self, step: int, progress: Progress, *, tested: int | None = None, give_up: GiveUp = lambda: False
    ) -> dict[str, Any]:
        """Evaluate on the test targets; what the summary of the run says about it, or GivenUpError.

        Args:
            step: steps the run has behind it.
            progress: where the event goes.
            tested: the step of the state that is evaluated; the last one unless given.
            give_up: whether to leave it unfinished.
        """
        metrics = self.evaluator.run(self.test, give_up=give_up)
        tested = step if tested is None else tested
        self._tell(tested, metrics, progress, split="test", trained_steps=step)
        shown = headline_of(metrics, self.metric)
        return {
            "best_metric": f"test {shown}",
            "best_value": metrics[shown],
            "best_step": tested,
            "popularity": self.popularity.get("test", {}).get(shown),
            "repeat_last": self.repeat.get("test", {}).get(shown),
            "test": metrics,
            "protocol": self.protocol.words("test"),
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "best": self.best,
            "evaluations_since_best": self.since_best,
            "evaluation_pending": self.pending,
            "verdict": self.verdict,
            "protocol": self.protocol.facts(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was; a best state that was judged otherwise is not held against later ones."""
        self.best = dict(state["best"])
        self.since_best = int(state["evaluations_since_best"])
        self.pending = bool(state.get("evaluation_pending", False))
        self.verdict = state.get("verdict")
        other = self.protocol.differences(state.get("protocol"))
        if self.best.get("metric", self.metric) != self.metric:
            other.append(f"by {self.best['metric']} there, {self.metric} now")
        if self.best and other:
            self.notices.append(
                f"the best state so far (step {self.best['step']}) was judged otherwise ({'; '.join(other)}): "
                "the best is the best from here on"
            )
            self.forget_best()

    def forget_best(self) -> None:
        """The best state so far is gone: the best is the best from here on."""
        self.best, self.since_best = {}, 0

    def _tell(
        self, step: int, metrics: Mapping[str, Any], progress: Progress, *, split: Split, **others: object
    ) -> None:
        progress.evaluation(
            step,
            metrics,
            popularity=self.popularity.get(split),
            repeat=self.repeat.get(split),
            protocol=self.protocol.words(split),
            split=split,
            **self.protocol.seen_facts(),
            **others,
        )


def judged_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """What a judge is told of an evaluation: step, split and metrics, now or from the log of a run that goes on."""
    names = [name for name in numeric_fields([dict(event)]) if not name.startswith((POPULARITY, REPEAT))]
    return {
        **{name: event[name] for name in ("step", "split")},
        "event": "eval",
        **{name: event[name] for name in names},
    }


def headline_of(metrics: Mapping[str, Any], metric: str) -> str:
    """What a summary shows: the hit rate of the shortest list, or the metric that decides."""
    return next((name for name in metrics if name.startswith("hr@")), metric)
