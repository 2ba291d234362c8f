"""What a report says of the experts: how evenly they were used, over the run and in its last part."""

from __future__ import annotations

from freescale.trace import MetricsLog, column, step_of

MOST_SHOWN = 64
"""Experts of a layer whose tokens are listed; more than this are summed up."""


def expert_facts(log: MetricsLog) -> dict[str, dict[str, object]]:
    """The load since the last evaluation, layer by layer, and the worst of the run; nothing without experts."""
    if not log.experts:
        return {}
    last = log.experts[-1]
    fullest, even, dead = (
        column([last], name)[0] for name in ("expert_max", "expert_entropy", "expert_dead")
    )
    sections: dict[str, dict[str, object]] = {
        f"up to step {step_of(last):,}": {
            "fullest expert over the mean": f"{fullest or 0:.2f}",
            "entropy, 1 is even": f"{even or 0:.4f}",
            "experts without a token": f"{dead or 0:.0f}",
            "at most over the run": f"{max(value or 0 for value in column(log.experts, 'expert_dead')):.0f}",
        }
    }
    layers = last.get("tokens_per_expert")
    for name, tokens in layers.items() if isinstance(layers, dict) else ():
        total = max(1, sum(tokens))
        shown: dict[str, object] = {
            f"expert {n}": f"{100 * count / total:.1f} %" for n, count in enumerate(tokens[:MOST_SHOWN])
        }
        if len(tokens) > MOST_SHOWN:
            shown["the others"] = f"{100 * sum(tokens[MOST_SHOWN:]) / total:.1f} %"
        sections[f"tokens, {name}"] = shown
    return sections
