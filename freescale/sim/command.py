"""What `freescale simulate` does, without parsing a command line or printing: text options in, an answer out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from freescale.errors import ConfigError
from freescale.pages import made_here, replace_file
from freescale.sim.answers.answer import Answer, profiled_cluster, simulate_answer
from freescale.sim.answers.keys import as_typed, changed, known_keys, parse_change, value_of
from freescale.sim.answers.page import render_page
from freescale.sim.answers.timeline import simulated_spans, write_timeline
from freescale.sim.answers.whatif import EVERYTHING, Failures, as_shipped
from freescale.sim.costs.setting import Features, Setting
from freescale.sim.inputs.cluster import load_cluster
from freescale.sim.inputs.profile import load_profile
from freescale.sim.inputs.workload import Workload

MOST_GPUS = 16_384


def simulate_from_options(
    *,
    changes: Sequence[str],
    gpus: str,
    profile: str,
    cluster: str | None,
    lengths: str | None,
    sweep: str | None,
    price: float | None,
    steps: int,
    mtbf_hours: float | None,
    page: Path | None,
    timeline: Path | None,
    quick: bool,
    command: str = "",
) -> Answer:
    """Predict, and write the page and the timeline where they are wanted; `command` is what was typed, for the page."""
    counts = parse_counts(gpus)
    setting = setting_before_changes(profile=profile, cluster=cluster, lengths=lengths)
    setting, features = _with_changes(setting, changes, lengths=lengths)
    if price is not None:
        setting, features = changed(setting, features, "cluster.price_per_gpu_hour", price)
    answer = simulate_answer(
        setting,
        counts,
        features=features,
        sweep=_parse_sweep(sweep),
        num_steps=steps,
        failures=None if mtbf_hours is None else Failures(mtbf_hours=mtbf_hours),
        with_sensitivity=not quick,
    )
    if cluster is None and setting.profile.device == "cpu":
        answer.notes.insert(
            0, "No --cluster was named, and the profile is of a CPU: ranks of one such machine."
        )
    if page is not None or timeline is not None:
        spans = simulated_spans(setting, as_shipped(setting, features, counts[-1]), num_ranks=counts[-1])
        if page is not None:
            page.parent.mkdir(parents=True, exist_ok=True)
            replace_file(page, render_page(answer, spans=spans, made=made_here(), command=command))
        if timeline is not None:
            timeline.parent.mkdir(parents=True, exist_ok=True)
            write_timeline(timeline, spans)
    return answer


def _with_changes(
    setting: Setting, changes: Sequence[str], *, lengths: str | None
) -> tuple[Setting, Features]:
    """Setting and features with every change made; what is wrong with any of them is told at once."""
    features, problems = EVERYTHING, list[ConfigError]()
    for text in changes:
        try:
            key, value = parse_change(text)
            if key == "workload.lengths" and lengths is not None:
                raise ConfigError(
                    "the lengths are given twice",
                    got=f"{lengths} and {key}={value}",
                    next_step="leave one of them out",
                )
            setting, features = changed(setting, features, key, value)
        except ConfigError as problem:
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        told = (f"{one.what}; {one.next_step}" if one.next_step else one.what for one in problems)
        raise ConfigError(
            f"{len(problems)} problems in the changes:\n  - " + "\n  - ".join(told),
            next_step="`freescale simulate --keys` lists every key with its default",
        )
    return setting, features


def setting_before_changes(*, profile: str, cluster: str | None, lengths: str | None = None) -> Setting:
    """What a prediction rests on where no key is changed.

    Without a cluster, a profile of a CPU is of ranks of one machine, one of a GPU of H100s.
    """
    workload = Workload() if lengths is None else Workload(lengths=lengths)
    measured = load_profile(profile)
    if "row_bytes" in measured.model:
        workload = replace(workload, row_bytes=int(measured.model["row_bytes"]))
    if "dense_parameters" in measured.model:
        workload = replace(workload, dense_bytes=4.0 * float(measured.model["dense_parameters"]))
    if "negatives" in measured.model:
        workload = replace(workload, negatives=float(measured.model["negatives"]))
    if "tables" in measured.model:
        workload = replace(workload, tables=str(measured.model["tables"]))
    is_cpu = measured.device == "cpu"
    where = load_cluster(cluster or ("cpu" if is_cpu else "h100"), measured=measured.slowdowns())
    if is_cpu != (where.device == "cpu"):
        raise _other_device(profile, cluster, is_cpu=is_cpu)
    return profiled_cluster(Setting(workload=workload, profile=measured, cluster=where))


def _other_device(profile: str, cluster: str | None, *, is_cpu: bool) -> ConfigError:
    """Compute of one and links and price of the other would be a prediction of nothing."""
    measured, named = ("CPU", "GPUs") if is_cpu else ("GPU", "CPU ranks")
    instead = "leave --cluster out" if is_cpu else "choose --cluster h100, h200 or b200"
    other = "--profile h200" if is_cpu else "--profile FILE of `freescale profile --device cpu`"
    return ConfigError(
        f"the profile is of a {measured}, the cluster of {named}",
        got=f"--profile {profile} --cluster {cluster}",
        next_step=f"{instead}, or take {other}; a cluster file of CPU ranks says `device: cpu`",
    )


def described_keys(*, profile: str, cluster: str | None) -> Iterator[tuple[str, str, str]]:
    """(key, default with this profile and cluster, help) of every key."""
    setting = setting_before_changes(profile=profile, cluster=cluster)
    for key, text in known_keys().items():
        yield key, as_typed(value_of(setting, EVERYTHING, key)), text


def parse_counts(text: str) -> list[int]:
    """8,64,256 as numbers, in order."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1 or counts[-1] > MOST_GPUS:
        raise ConfigError(
            "--gpus takes numbers of GPUs", got=text, allowed=f"such as 8,64,256; 1 to {MOST_GPUS}"
        )
    return counts


def _parse_sweep(text: str | None) -> tuple[str, list[str]] | None:
    if text is None:
        return None
    key, equals, values = text.partition("=")
    # Distributions of lengths have commas of their own.
    parts = [part.strip() for part in values.split(";" if ";" in values else ",") if part.strip()]
    if not equals or not parts:
        raise ConfigError(
            "--sweep takes a key and values", got=text, allowed="such as cluster.nic_gb_per_s=25,50,100"
        )
    return key.strip(), parts
