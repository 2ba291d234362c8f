"""Draws docs/images/bubbles.svg: one batch on 8 ranks, shared out at random and balanced, from planned times.

python docs/make_bubbles.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from freescale.balance import Partition, assignment_report, partition_report

OUT = Path(__file__).parent / "images" / "bubbles.svg"
RANKS, SAMPLES_A_RANK = 8, 32
BAR, GAP, TOP, LEFT, PANEL = 13, 4, 52, 58, 372
WIDTH, HEIGHT = 900, 224
WORK, EDGE, IDLE, INK, SOFT = "#2a7f9e", "#f7f9fa", "#e9b9a6", "#1f2d33", "#5b6b73"


def one_batch() -> tuple[np.ndarray, np.ndarray]:
    """Lengths and costs of the first batch of benchmarks/balance_quality.py, log-normal lengths, 8 x 32 samples."""
    rng = np.random.default_rng(RANKS * 100 + SAMPLES_A_RANK)
    drawn = np.exp(rng.normal(np.log(512), 1.0, RANKS * SAMPLES_A_RANK))
    lengths = np.clip(drawn, 1, 8192).astype(np.int64)
    return lengths, lengths + np.square(lengths, dtype=np.float64) / 2048


def panel(plan: Partition, costs: np.ndarray, *, left: float, scale: float, title: str) -> list[str]:
    """Eight bars cut into samples, longest first, and the time until the latest rank is done."""
    latest = float(plan.times.max())
    parts = [
        f'<text x="{left}" y="24" font-size="15" font-weight="600" fill="{INK}">{title}</text>',
        f'<text x="{left}" y="42" font-size="12.5" fill="{SOFT}">'
        f"{100 * plan.bubble:.2f} % of the ranks' planned time idle</text>",
    ]
    for rank, samples in enumerate(plan.ranks):
        top = TOP + rank * (BAR + GAP)
        parts.append(
            f'<rect x="{left}" y="{top}" width="{latest * scale:.1f}" height="{BAR}" fill="{IDLE}"/>'
        )
        edges = np.concatenate([[0.0], np.cumsum(np.sort(costs[samples])[::-1])]) * scale
        parts.append(f'<rect x="{left}" y="{top}" width="{edges[-1]:.1f}" height="{BAR}" fill="{WORK}"/>')
        parts += [
            f'<path d="M{left + edge:.1f} {top}v{BAR}" stroke="{EDGE}" stroke-width="0.7"/>'
            for last, edge in itertools.pairwise(edges[:-1])
            if edge - last > 2.5
        ]
    return parts


def draw() -> str:
    """The whole picture as SVG."""
    lengths, costs = one_batch()
    in_turn = np.arange(len(costs)) % RANKS
    plans = {
        "Random assignment": assignment_report(costs, in_turn, RANKS),
        "Balanced by FreeScale": partition_report(costs, RANKS, tokens=lengths),
    }
    scale = PANEL / max(float(plan.times.max()) for plan in plans.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        "<title>One batch on 8 ranks, shared out at random and balanced</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{EDGE}"/>',
    ]
    for rank in range(RANKS):
        y = TOP + rank * (BAR + GAP) + BAR - 2.5
        parts.append(f'<text x="14" y="{y}" font-size="11" fill="{SOFT}">rank {rank}</text>')
    for number, (title, plan) in enumerate(plans.items()):
        left = LEFT + number * (PANEL + 56)
        parts += panel(plan, costs, left=left, scale=scale, title=title)
    y = TOP + RANKS * (BAR + GAP) + 22
    parts += [
        f'<rect x="{LEFT}" y="{y - 10}" width="12" height="12" fill="{WORK}"/>',
        f'<text x="{LEFT + 18}" y="{y}" font-size="12" fill="{INK}">compute, one piece a sample</text>',
        f'<rect x="{LEFT + 200}" y="{y - 10}" width="12" height="12" fill="{IDLE}"/>',
        f'<text x="{LEFT + 218}" y="{y}" font-size="12" fill="{INK}">waiting for the slowest rank</text>',
        f'<text x="{LEFT + 428}" y="{y}" font-size="12" fill="{SOFT}">time runs to the right, same scale on both sides'
        "</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
