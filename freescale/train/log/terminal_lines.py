"""What a terminal says of the events of a run, in words: fields of a step line, lines of other events, closing rows."""

from __future__ import annotations

from collections.abc import Mapping

from freescale import units
from freescale.trace import BASELINES, CAUSES, Event, numeric_fields, step_of
from freescale.train.log.task_lines import TASK_SHOWN, task_rows

Field = tuple[str, str, str]
"""What stands before a number, the number, what stands after it."""

EVAL_SHOWN = {"hr@": 2, "ndcg@": 1, "mrr": 1}
"""How many metrics of a kind an eval line shows; all others are in metrics.jsonl, one line must stay readable."""


def step_fields(event: Event, step: int, total: int, seconds_left: float | None) -> dict[str, Field]:
    """What a step line says, in its order; what was not measured is left out."""
    fields: dict[str, Field] = {"step": ("", f"{step:>{len(str(total))}}/{total}", "")}
    epoch, rate = units.number(event.get("epoch")), units.number(event.get("tokens_per_s"))
    balance, bubble = units.number(event.get("imbalance")), units.number(event.get("bubble"))
    loss = event.get("loss")
    if epoch is not None:
        fields["epoch"] = ("epoch ", f"{epoch:.0f}" if epoch.is_integer() else f"{epoch:.1f}", "")
    # A NaN loss is shown, not hidden: it is the one thing the reader must see.
    fields["loss"] = ("loss ", units.loss(loss) if isinstance(loss, float | int) else "-", "")
    if rate is not None:
        fields["tokens"] = ("", f"{rate:,.0f}", " tok/s")
    if balance is not None:
        fields["balance"] = ("balance ", f"{balance:.2f}", "")
    load = units.number(event.get("expert_max"))
    if load is not None:
        fields["experts"] = ("experts ", f"{load:.2f}", "")
    if bubble is not None:
        fields["bubble"] = ("bubble ", f"{bubble:.1%}", "")
        shares = {cause: units.number(event.get(cause)) for cause in CAUSES}
        known = [f"{cause} {100 * share:4.1f}" for cause, share in shares.items() if share is not None]
        if known:
            fields["causes"] = ("(", " ".join(known), ")")
    captured = units.number(event.get("captured"))
    if captured is not None:
        fields["captured"] = ("captured ", f"{captured:.0%}", "")
    if seconds_left is not None:
        fields["eta"] = ("eta ", units.duration(seconds_left), "")
    return fields


def eval_parts(event: Event) -> list[str]:
    """An eval line in two parts: the metrics, and what to hold them against."""
    measured = [name for name in numeric_fields([event]) if not name.startswith(tuple(BASELINES))]
    shown = [
        name
        for kind, most in EVAL_SHOWN.items()
        for name in [n for n in measured if n.startswith(kind)][:most]
    ] or [name for name in measured if "/" not in name or name.startswith(TASK_SHOWN)]
    metrics = "".join(f"  {name} {_metric(event[name])}" for name in shown)
    known = {
        words: event[prefix + shown[0]]
        for prefix, words in BASELINES.items()
        if shown and units.number(event.get(prefix + shown[0])) is not None
    }
    baseline = ", ".join(
        f"{words} {shown[0]} {_metric(value)}" if n == 0 else f"{words} {_metric(value)}"
        for n, (words, value) in enumerate(known.items())
    )
    baseline = f"({baseline})  " if baseline else ""
    label = "test" if event.get("split") == "test" else "eval"
    return [f"{label}  step {step_of(event)}{metrics}", f"{baseline}{event.get('protocol') or ''}".rstrip()]


def postpone_line(event: Event) -> str:
    """How much of the weight gradients waits from now on, and what was measured for it."""
    took = event.get("ms")
    times = ", ".join(f"{share}: {ms} ms" for share, ms in took.items()) if isinstance(took, Mapping) else ""
    share, kept = units.number(event.get("share")) or 0.0, units.number(event.get("kept_mb")) or 0.0
    return (
        f"weight gradients: {share:.0%} postponed from step {event.get('from_step')} on "
        f"({times}; {kept:,.1f} MiB kept)"
    )


def pipeline_line(event: Event) -> str:
    """Which way rows travel from now on, and what both took."""
    way = "prioritized" if event.get("prioritized") else "plain"
    on, off = (units.number(event.get(name)) or 0.0 for name in ("prioritized_ms", "plain_ms"))
    return (
        f"rows   step {step_of(event)}  {way} communication from step {event.get('from_step')} on: "
        f"{on:.1f} ms a step prioritized, {off:.1f} ms plain"
    )


def id_parts(event: Event, *, table: str = "") -> list[str]:
    """How full the table is and what happened to ids since the last such line; a warning if there is one.

    `table`: its name, where it is not that of items.
    """
    counts = {name: units.number(event.get(name)) or 0 for name in ("asked", "hits", "inserts", "evictions")}
    shared = (units.number(event.get("collisions")) or 0) + (units.number(event.get("not_admitted")) or 0)
    full, hits = units.number(event.get("occupancy")) or 0.0, counts["hits"] / max(1, counts["asked"])
    whose = f"{table}  " if table else ""
    line = f"ids   step {step_of(event)}  {whose}{full:.1%} of {event.get('slots'):,} slots taken  {hits:.1%} hits"
    line += f"  {counts['inserts']:,.0f} new  {counts['evictions']:,.0f} evicted  {shared:,.0f} shared a row"
    warning = event.get("warning")
    return [line, f"warning: {table + ': ' if table else ''}{warning}"] if warning else [line]


def expert_line(event: Event) -> str:
    """How evenly the experts were used since the last such line."""
    fullest, even, dead = (
        units.number(event.get(f"expert_{name}")) or 0.0 for name in ("max", "entropy", "dead")
    )
    return (
        f"experts step {step_of(event)}  fullest {fullest:.2f} times the mean  entropy {even:.4f}  "
        f"{dead:.0f} without a token"
    )


def _metric(value: object) -> str:
    number = units.number(value)
    return "-" if number is None else units.metric(number)


def summary_rows(summary: Mapping[str, object]) -> dict[str, str]:
    """The rows of the closing box: how long, how fast, how good; what is not known by name as it is."""
    numbers = {name: number for name, value in summary.items() if (number := units.number(value)) is not None}
    rows: dict[str, str] = {}
    if "seconds" in numbers:
        rows["time"] = units.long_duration(numbers["seconds"])
    if "steps" in numbers:
        rows["steps"] = f"{numbers['steps']:,.0f}"
    rates = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
    speeds = [f"{numbers[name]:,.0f} {unit}" for name, unit in rates.items() if name in numbers]
    if speeds:
        rows["speed"] = f"{'   '.join(speeds)}   over the whole time"
    if "bubble" in numbers:
        rows["bubble"] = units.percent(numbers["bubble"])
    if "loss" in numbers:
        rows["loss"] = units.loss(numbers["loss"])
    rows |= _quality_rows(summary, numbers)
    used = {"event", "time", "step", "status", "seconds", "steps", *rates, "bubble", "loss", "best_metric"}
    used |= {"best_value", "best_step", "popularity", "repeat_last"}
    tested = task_rows("test", summary.get("test"))
    if tested is not None:
        rows |= tested
        used |= {"test"}
    return rows | {
        name: units.fact(value) for name, value in summary.items() if name not in used and value is not None
    }


def _quality_rows(summary: Mapping[str, object], numbers: Mapping[str, float]) -> dict[str, str]:
    """The best metric and, beside it, what no training at all would have reached."""
    if "best_value" not in numbers:
        return {}
    metric = str(summary.get("best_metric") or "metric")
    step = f" at step {numbers['best_step']:,.0f}" if "best_step" in numbers else ""
    best = f"{metric} {units.metric(numbers['best_value'])}{step}"
    for name, words in (("popularity", "popularity"), ("repeat_last", "repeat last")):
        times = units.factor(numbers["best_value"], numbers.get(name))
        best += f", {times} {words} ({units.metric(numbers[name])})" if times else ""
    return {"best": best}
