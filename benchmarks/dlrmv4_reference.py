"""DLRMv4 here against the code of its reference: same weights, same inputs; predictions, loss and all gradients.

    PYTHONPATH=. python benchmarks/dlrmv4_reference.py --peer DIR

DIR is the folder `recommendation_v4` of a checkout of mlcommons/training that has it (commit a67b8459). Its modules are
run as they are, on their plain PyTorch path. Where torchrec and fbgemm_gpu are not installed, three operations of
theirs on jagged tensors are stood in for, and the classes that the modules import and do not use here.

Lengths are those of the made-up log (`data.source=dlrmv4_twin`): real ones, 2,663 events in the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlrmv4_parts.inputs import inputs_of, real_lengths
from dlrmv4_parts.ours import Ours
from dlrmv4_parts.reference import Theirs, stand_ins
from dlrmv4_parts.weights import pairs
from torch import Tensor


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def compare(
    lengths: list[int], *, dim: int, heads: int, layers: int, dtype: torch.dtype, short: bool, seed: int
) -> dict[str, Any]:
    """All differences of one batch."""
    torch.manual_seed(seed)
    theirs = Theirs(dim=dim, heads=heads, layers=layers)
    ours = Ours(dim=dim, heads=heads, layers=layers, short=short)
    # Norms and biases start as ones and zeros, which would hide what they are multiplied with.
    with torch.no_grad():
        for param in theirs.model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    theirs.model.to(dtype)
    theirs.model.set_training_dtype(dtype)
    ours.model.to(dtype).train()
    listed = pairs(theirs, ours, dim)
    covered = {id(mine) for _, _, mine, _ in listed}
    forgotten = [
        name
        for name, param in ours.model.named_parameters()
        if id(param) not in covered and "none.of_" not in name
    ]
    assert not forgotten, f"weights without a counterpart: {forgotten}"
    with torch.no_grad():
        for _, peer, mine, made in listed:
            mine.copy_(made(peer))
    given = inputs_of(lengths, dim=dim, dtype=dtype, seed=seed)
    predicted, loss = theirs(given)
    loss.backward()
    of_rows = {name: rows.grad.clone() for name, rows in given.rows.items()}
    for rows in given.rows.values():
        rows.grad = None
    own_predicted, own_loss = ours(given)
    own_loss.backward()
    dense = {name: relative(mine.grad, made(peer.grad)) for name, peer, mine, made in listed}
    tables = {name: relative(rows.grad, of_rows[name]) for name, rows in given.rows.items()}
    return {
        "dim": dim,
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "short last layer": short,
        "samples": len(lengths),
        "mean length": float(np.mean(lengths)),
        "weights": sum(param.numel() for param in ours.model.parameters()),
        "their weights": sum(param.numel() for param in theirs.model.parameters()),
        "predictions": relative(own_predicted, predicted),
        "loss": relative(own_loss, loss),
        "dense gradients": max(dense.values()),
        "worst weight": max(dense, key=dense.__getitem__),
        "table gradients": max(tables.values()),
        "worst table": max(tables, key=tables.__getitem__),
    }


def main() -> None:
    """Compare, print a table, and fail where something is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, type=Path, help="folder recommendation_v4 of a checkout")
    parser.add_argument("--quick", action="store_true", help="short histories only")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(options.peer))
    made = stand_ins()
    for line in made:
        print(f"stood in for {line}")
    short = real_lengths(6, seed=options.seed, most=90)
    cases: list[dict[str, Any]] = [
        {"lengths": short, "dim": 64, "heads": 2, "layers": 3, "dtype": torch.float32},
        {"lengths": short, "dim": 64, "heads": 2, "layers": 3, "dtype": torch.float64},
        {"lengths": short, "dim": 512, "heads": 4, "layers": 3, "dtype": torch.float32},
    ]
    if not options.quick:
        cases += [
            {
                "lengths": real_lengths(3, seed=options.seed),
                "dim": 64,
                "heads": 1,
                "layers": 3,
                "dtype": torch.float32,
            },
            {
                "lengths": real_lengths(2, seed=options.seed),
                "dim": 512,
                "heads": 4,
                "layers": 3,
                "dtype": torch.float32,
            },
        ]
    rows = []
    print(
        f"{'width':>6} {'type':>8} {'last':>6} {'mean length':>12} "
        f"{'predictions':>12} {'loss':>9} {'dense':>9} {'tables':>9}  worst"
    )
    for case in cases:
        for cut in (False, True):
            row = compare(**case, short=cut, seed=options.seed)
            rows.append(row)
            print(
                f"{row['dim']:>6} {row['dtype']:>8} {'short' if cut else 'whole':>6} {row['mean length']:>12.0f} "
                f"{row['predictions']:>12.1e} {row['loss']:>9.1e} {row['dense gradients']:>9.1e} "
                f"{row['table gradients']:>9.1e}  {row['worst weight']}, {row['worst table']}",
                flush=True,
            )
    print(json.dumps({"stood in for": made, "rows": rows}))
    worst = max(
        max(row[name] for name in ("predictions", "loss", "dense gradients", "table gradients"))
        for row in rows
    )
    if worst > 1e-5:
        sys.exit(f"differs from the reference by {worst:.1e}, more than 1e-5")


if __name__ == "__main__":
    main()
