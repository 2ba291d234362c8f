"""prediction: what `freescale simulate` foretells of these ranks, held against what they do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from freescale.comm.world import Ranks, virtual_gpus_here
from freescale.profiling import measure_profile, measure_sharing_ranks
from freescale.prove.claim import (
    NOT_PROVEN,
    PROVEN,
    Evidence,
    Facts,
    Finding,
    Report,
    Setting,
    Table,
    evidence_of,
    one_case,
)
from freescale.prove.runs import account_of, length_of, long_tailed, samples_of, train_shortly
from freescale.recipe import Config, build_examples, build_sampler, build_source, load_config
from freescale.registry import register
from freescale.sim import Features, Profile, Workload, load_cluster, loads_of, preset_names, simulate_features
from freescale.sim import Setting as SimSetting

MOST_STEP, MOST_BUBBLE = 0.10, 0.05
"""Of the step, relative, and of the bubble, in shares of the step: twice what an idle machine shows."""
_STEPS = 40
_PLAIN = "pipeline.prioritized=false"
_WAYS = {
    "all off": (
        ("balance.enabled=false", _PLAIN),
        Features(balancer="random", prioritized=False, sm_free=False),
    ),
    "balance": (
        ("balance.enabled=true", _PLAIN),
        Features(prioritized=False, sm_free=False),
    ),
}


@register("claim", "prediction")
class Prediction:
    """A profile is measured, by rank 0 or by ranks that share a GPU; then all train what was foretold from it."""

    title = "The simulator foretells step time and bubble of these ranks"
    order = 75
    limit_s = 540.0
    patience_s = 500.0
    cases = staticmethod(one_case)

    @staticmethod
    def why_not(facts: Facts) -> str | None:
        """What a profile of one process can stand for."""
        if facts.quick:
            return "left out by --quick: a profile takes minutes"
        if facts.num_ranks == 1:
            return "there is one rank only"
        if facts.num_machines > 1:
            return "foretold are ranks of one machine: links between machines are not measured"
        return None

    @staticmethod
    def measure(ranks: Ranks, setting: Setting) -> Evidence:
        """The profile first, while nobody trains; then both ways of training."""
        steps, warm = length_of(ranks, _STEPS)
        keys = (*long_tailed(ranks), f"run.steps={steps}", f"run.device={ranks.device.type}")
        evidence: Evidence = {}
        config = load_config(None, list(keys))
        profile = _profile(config, ranks)
        if profile is not None:
            setting.out.mkdir(parents=True, exist_ok=True)
            (setting.out / "profile.json").write_text(profile.to_json())
            told = Foretold(config, profile, _cluster_of(profile), steps, warm)
            evidence["predicted"] = {
                way: told.run(ranks.num_ranks, replace(features, sm_free=profile.device == "cuda"))
                for way, (_, features) in _WAYS.items()
            }
            evidence["links"] = "" if profile.has_links else told.cluster
        ranks.barrier()
        evidence["load"], evidence["cores"] = os.getloadavg()[0], os.cpu_count() or 1
        evidence["measured"] = {}
        for way, (more, _) in _WAYS.items():
            account = account_of(train_shortly(ranks, (*keys, *more)).steps, warm=warm)
            evidence["measured"][way] = {name: account[name] for name in ("step_ms", "bubble")}
        return evidence

    @staticmethod
    def judge(reports: Sequence[Report], setting: Setting) -> list[Finding]:
        """Both ways, step and bubble."""
        seen = evidence_of(reports, "step and bubble")
        if isinstance(seen, Finding):
            return [seen]
        measured, foretold = seen[0]["measured"], seen[0]["predicted"]
        rows, steps, bubbles = [], [], []
        for way, real in measured.items():
            guess = foretold[way]
            steps.append(abs(guess["step_ms"] / real["step_ms"] - 1))
            bubbles.append(abs(guess["bubble"] - real["bubble"]))
            rows.append(
                [
                    way,
                    f"{real['step_ms']:.1f}",
                    f"{guess['step_ms']:.1f}",
                    f"{real['bubble']:.1%}",
                    f"{guess['bubble']:.1%}",
                ]
            )
        table = Table(("", "ms a step", "foretold", "bubble", "foretold"), rows)
        held = max(steps) <= MOST_STEP and max(bubbles) <= MOST_BUBBLE
        says = (
            f"step time off by at most {max(steps):.1%} ({MOST_STEP:.0%} allowed), bubble by {100 * max(bubbles):.1f} "
            f"points ({100 * MOST_BUBBLE:.0f} allowed); the profile is profile.json beside this page"
        )
        if preset := seen[0].get("links"):
            says += f"; links between GPUs are those of the preset {preset}, not measured"
        load, cores = seen[0].get("load", 0.0), seen[0].get("cores", 1)
        if load > cores + 0.5 * len(seen):
            says += f"; the machine was busy with other things (load {load:.1f} on {cores} cores): try it when idle"
        figures = {"measured": measured, "predicted": foretold, "load": load, "cores": cores}
        return [Finding("step and bubble", PROVEN if held else NOT_PROVEN, says, figures, table)]


def _profile(config: Config, ranks: Ranks) -> Profile | None:
    """Known to rank 0, which measures it while the others stand still, or with all of them where they share a GPU."""
    samples = samples_of(ranks)
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)
    elif virtual_gpus_here():
        shared = measure_sharing_ranks(config, ranks, seconds=10.0, most_samples=samples)
        return shared if ranks.is_first else None
    if not ranks.is_first:
        return None
    return measure_profile(config, device=ranks.device.type, seconds=20.0, most_samples=samples)


def _cluster_of(profile: Profile) -> str:
    """The preset that is meant; of GPUs that have none, the links of an H100."""
    if profile.device == "cpu":
        return "cpu"
    return next((name for name in preset_names() if name in profile.hardware.lower()), "h100")


@dataclass(frozen=True)
class Foretold:
    """What the simulator says of steps that are going to be trained.

    Args:
        config: the recipe.
        profile: of these ranks.
        cluster: a preset.
        steps: all that are trained.
        warm: how many of them do not count.
    """

    config: Config
    profile: Profile
    cluster: str
    steps: int
    warm: int

    def run(self, num_ranks: int, features: Features) -> dict[str, float]:
        """Step time and bubble of the very batches that are trained."""
        config, profile = self.config, self.profile
        source = build_source(config)
        one = Ranks(rank=0, num_ranks=1, device=torch.device("cpu"))
        batches: Any = build_sampler(
            config, build_examples(config, source, "train", negatives=True), one
        ).batches
        workload = Workload(
            samples_per_gpu=max(1, config.data.global_batch // num_ranks),
            ids_per_token=2.0,
            negatives=float(config.head.num_negatives),
            table_rows=len(source.items.ids),
            zipf=config.synthetic.zipf,
            row_bytes=int(profile.model["row_bytes"]),
            dense_bytes=4.0 * float(profile.model["dense_parameters"]),
        )
        told = SimSetting(workload=workload, profile=profile, cluster=load_cluster(self.cluster), jitter=None)
        loads = loads_of(
            lambda step: batches.lengths_of(batches.batch(step)),
            num_ranks=num_ranks,
            num_steps=self.steps,
            balancer=features.balancer,
            cost_model=told.cost_model(),
        )
        cores = os.cpu_count() or 1
        made = simulate_features(
            told,
            features,
            num_ranks=num_ranks,
            num_steps=self.steps,
            loads=loads,
            cores=cores if profile.device == "cpu" and num_ranks > cores else None,
        )
        parts = made.outcome.accounts.parts(warmup=self.warm)
        return {"step_ms": 1000 * parts.total / (self.steps - self.warm), "bubble": parts.bubble}
