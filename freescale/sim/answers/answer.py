"""The whole answer of `freescale simulate`: predictions, ablation, sweep, sensitivity and what to trust of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from freescale.sim.answers.confidence import EXTRAPOLATED, Mark, marks
from freescale.sim.answers.keys import changed
from freescale.sim.answers.sensitivity import Influence, influences
from freescale.sim.answers.whatif import (
    ABLATION,
    BASELINE,
    EVERYTHING,
    LADDER,
    Failures,
    Prediction,
    as_shipped,
    one_gpu_rate,
    plan_steps_for,
    predict,
    reduction,
    table,
    unique_features,
)
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster

PREDICTION = "Predictions of a model, not measurements."


@dataclass(frozen=True)
class Sweep:
    """One parameter over several values, everything else as asked."""

    key: str
    values: list[str]
    predictions: list[Prediction]


@dataclass(frozen=True)
class Answer:
    """What would N GPUs give me?

    Args:
        setting: what it rests on.
        gpus: the numbers asked for.
        ladder: one idea after the other, on every number of GPUs.
        ablation: everything but one idea, on the largest number.
        influences: which assumption moves the answer most, on the largest number.
        marks: what is calibrated and what extrapolated.
        sweep: one parameter over several values.
    """

    setting: Setting
    gpus: list[int]
    features: Features
    ladder: list[Prediction]
    ablation: list[Prediction]
    influences: list[Influence]
    marks: list[Mark]
    sweep: Sweep | None = None
    failures: Failures | None = None
    notes: list[str] = field(default_factory=list)

    def best(self, gpus: int) -> Prediction:
        """Everything on that can be, on this many GPUs."""
        return [one for one in self.ladder if one.gpus == gpus][-1]

    def baseline(self, gpus: int) -> Prediction:
        """Everything off."""
        return next(one for one in self.ladder if one.gpus == gpus)

    def bubble_reduction(self, gpus: int, *, of: str = "bubble") -> float:
        """Share of the bubble that all ideas together take away."""
        return reduction(self.baseline(gpus), self.best(gpus), of=of)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "prediction": PREDICTION,
            "cluster": asdict(self.setting.cluster),
            "profile": {"hardware": self.setting.profile.hardware, **dict(self.setting.profile.facts)},
            "workload": asdict(self.setting.workload),
            "rows": [one.as_row() for one in self.ladder],
            "ablation": [one.as_row() for one in self.ablation],
            "bubble_reduction": {str(gpus): self.bubble_reduction(gpus) for gpus in self.gpus},
            "lost_reduction": {str(gpus): self.bubble_reduction(gpus, of="lost") for gpus in self.gpus},
            "sensitivity": [asdict(one) for one in self.influences],
            "confidence": [asdict(one) for one in self.marks],
            "sweep": None
            if self.sweep is None
            else {
                "key": self.sweep.key,
                "values": self.sweep.values,
                "rows": [one.as_row() for one in self.sweep.predictions],
            },
            "notes": self.notes,
        }


def profiled_cluster(setting: Setting) -> Setting:
    """The same, with compute scaled from the profiled GPU to the cluster's, where both are known."""
    if setting.profile.device != "cuda":
        return setting
    name = setting.profile.hardware.upper()
    for preset in ("h100", "h200", "b200"):
        if preset.upper() in name:
            return replace(setting, profiled_on=load_cluster(preset))
    return setting


def simulate_answer(
    setting: Setting,
    gpus: Sequence[int],
    *,
    features: Features | None = None,
    sweep: tuple[str, Sequence[str]] | None = None,
    num_steps: int = 200,
    failures: Failures | None = None,
    with_sensitivity: bool = True,
) -> Answer:
    """Predict everything that was asked for."""
    wanted = features or EVERYTHING
    asked = sorted(set(gpus))
    if sweep is not None:
        for value in sweep[1]:
            changed(setting, wanted, sweep[0], value)  # mistakes are told before the work
    window: dict[str, Any] = {"window": wanted.window, "token_cap": wanted.token_cap}
    combinations = [one if one == BASELINE else replace(one, **window) for one in LADDER[:-1]]
    if wanted.node_dedup:
        combinations.append(
            replace(wanted, node_dedup=False)
        )  # what it adds stands beside what it is added to
    combinations = [one for one in combinations if one != wanted] + [wanted]
    largest = asked[-1]
    ladder = list(table(setting, asked, combinations, num_steps=num_steps, failures=failures))
    alone = one_gpu_rate(setting)

    def on_largest(changed_setting: Setting, chosen: Features, *, single: float | None = alone) -> Prediction:
        return predict(
            changed_setting,
            as_shipped(changed_setting, chosen, largest),
            num_ranks=largest,
            num_steps=num_steps,
            plan_steps=plan_steps_for(largest),
            alone=single,
            failures=failures,
        )

    without = []
    if wanted == EVERYTHING:
        *without, _ = unique_features(
            setting, [*(replace(one, **window) for one in ABLATION), wanted], largest
        )
    ablation = [on_largest(setting, one) for one in without]
    swept = None
    if sweep is not None:
        key, values = sweep
        rows = [on_largest(*changed(setting, wanted, key, value), single=None) for value in values]
        swept = Sweep(key, list(values), rows)
    answer = Answer(
        setting=setting,
        gpus=asked,
        features=wanted,
        ladder=ladder,
        ablation=ablation,
        influences=influences(setting, as_shipped(setting, wanted, largest), num_ranks=largest)
        if with_sensitivity
        else [],
        marks=marks(setting, num_ranks=largest),
        sweep=swept,
        failures=failures,
    )
    answer.notes.extend(_notes(answer))
    return answer


def _notes(answer: Answer) -> list[str]:
    """What a reader should not have to find out from the table."""
    notes = []
    best, word = answer.best(answer.gpus[-1]), answer.setting.rank_word
    if best.bound > 0.01:
        notes.append(
            f"On {answer.setting.ranks_in_words(best.gpus)} the longest samples are longer than a rank's share: no "
            f"assignment of one step gets below {best.bound:.0%} idle. Try features.window=4, or more samples a {word}."
        )
    notes += _above_one(answer)
    largest, asked = answer.gpus[-1], answer.features
    if asked.sm_free and not as_shipped(answer.setting, asked, largest).sm_free and word == "GPU":
        notes.append(
            "Between nodes no SM-free transport has run: there exchanges go by kernels. cluster.sm_free_network=1 asks "
            "what one would give."
        )
    if word == "GPU" and any(
        as_shipped(answer.setting, asked, each).sm_free for each in answer.gpus if each > 1
    ):
        notes.append(
            "SM-free in a node: copies between GPUs are taken to be those of copy engines, as CUDA makes them; that "
            "has not run here. What is copied inside a GPU, out of a window, is a kernel and is left out."
        )
    if asked.node_dedup and not as_shipped(answer.setting, asked, largest).node_dedup:
        notes.append(
            f"Rows are asked for once a rank: once a node needs deduplication, and several full nodes of "
            f"{answer.setting.cluster.gpus_per_node} {word}s."
        )
    elif asked.node_dedup:
        notes.append(
            "node dedup has not run on a cluster: ids of a node's ranks are taken to be drawn independently, and a "
            "rank that collects rows for its node to copy and sum them as fast as an owner gathers them."
        )
    if asked.postpone and not as_shipped(answer.setting, asked, largest).postpone:
        notes.append(
            "Weight gradients are not postponed: the profile does not say how long they take. `freescale profile` "
            "times them; setting.weights_share=0.2 assumes a fifth of the backward."
        )
    parts = [mark.part for mark in answer.marks if mark.state == EXTRAPOLATED]
    if parts:
        notes.append(
            f"Extrapolated, not measured, {len(parts)} of {len(answer.marks)} parts: {', '.join(parts)}."
        )
    return notes


def _above_one(answer: Answer) -> Iterator[str]:
    """Why ranks can be faster together than one alone: what they hide, or the batches they happened to draw."""
    word, rows = answer.setting.rank_word, (*answer.ladder, *answer.ablation)
    above = [one for one in rows if one.efficiency > 1 and one.gpus > 1]
    lucky = {one.gpus for one in above if not one.features.prioritized}
    if any(one.gpus not in lucky for one in above):
        yield (
            f"Efficiency above 100 %: it is held against one {word} alone, which finds, gathers and updates its rows "
            f"before and after its compute. On several {word}s prioritized communication does most of that beside it."
        )
    if lucky:
        ranks = ", ".join(answer.setting.ranks_in_words(count) for count in sorted(lucky))
        yield (
            f"Efficiency above 100 % on {ranks} also where nothing is hidden: the batches drawn for them were easier "
            f"than those of the one {word} alone that it is held against. More --steps draw more of them."
        )
