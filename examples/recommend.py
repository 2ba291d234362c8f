"""Train a tiny model, export it, and recommend from the exported folder alone.

    python examples/recommend.py [FOLDER]

Takes some ten seconds on a CPU. FOLDER (a temporary one unless given) then holds the run and the export.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from freescale import load_export

TINY = (
    "synthetic.users=400",
    "synthetic.items=100",
    "data.max_length=40",
    "model.dim=16",
    "model.dropout=0",
    "optim.lr=0.01",
    "embedding.lr=0.01",
    "run.steps=40",
    "run.eval_every=20",
)


def freescale(*arguments: str | Path) -> None:
    """A freescale command, as it would be typed in a shell."""
    print("$ freescale", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "freescale", *map(str, arguments)], check=True)


def main(folder: Path) -> None:
    freescale("train", *TINY, f"run.out={folder / 'run'}")
    freescale("export", folder / "run", folder / "export")

    model = load_export(folder / "export")
    # Histories stand in time order. This model was trained with time stamps, so it wants them here too.
    history, times = [31, 7, 12], [1_600_000_000, 1_600_000_900, 1_600_003_600]
    best = model.recommend(history, times=times, request_time=1_600_007_200, k=5)
    print(f"after {history}:", ", ".join(f"item {item} ({score:.2f})" for item, score in best))
    # In these data people repeat items, so the model recommends them again unless it is told not to.
    new = model.recommend(history, times=times, request_time=1_600_007_200, k=5, filter_seen=True)
    print(f"new after {history}:", ", ".join(f"item {item} ({score:.2f})" for item, score in new))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
