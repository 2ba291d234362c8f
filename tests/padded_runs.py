"""Runs on a CPU that pad their batches, as runs on a GPU do whose steps are recorded; here nothing is recorded."""

from __future__ import annotations

from typing import Any

from freescale.recipe.building.capture import Capture, assemble_capture, foreseen_sizes
from freescale.train import Recorder


def padded_capture(
    config: Any,
    ranks: Any,
    progress: Any,
    *,
    model: Any,
    tables: Any,
    lr_factor: Any,
    sampler: Any,
    examples: Any,
) -> Capture:
    """Takes the place of `build_capture` in `recipe.assembly`."""
    return assemble_capture(
        config,
        Recorder(ranks.device),
        ranks=ranks,
        model=model,
        tables=tables,
        examples=examples,
        lr_factor=lr_factor,
        sizes=foreseen_sizes(sampler, examples, tables, model=model, config=config),
    )
