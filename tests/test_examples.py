"""The examples run, alone and on two ranks, and print the same losses either way."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


Run = Callable[..., str]


@pytest.fixture
def run(python: str) -> Run:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}

    def run(*command: str | Path) -> str:
        result = subprocess.run(
            [python, *map(str, command)], capture_output=True, text=True, timeout=110, env=environment
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize(
    "name", ["balanced_dataloader.py", "sharded_embedding.py", "prioritized_pipeline.py"]
)
def test_one_and_two_ranks_print_the_same_losses(name: str, run: Run) -> None:
    alone = losses(run(EXAMPLES / name))
    together = losses(
        run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLES / name)
    )
    assert len(alone) == 3
    assert alone[-1] < 0.5 * alone[0]
    # The last printed digit may differ.
    assert together == pytest.approx(alone, abs=2e-4)


def test_recommend_from_an_export(tmp_path: Path, run: Run) -> None:
    output = run(EXAMPLES / "recommend.py", tmp_path)
    assert "seen kept" in output
    best, recommended = (re.findall(r"item (\d+) \(", line) for line in output.splitlines()[-2:])
    assert len(set(best)) == len(set(recommended)) == 5
    assert not {"31", "7", "12"} & set(recommended)
    assert (tmp_path / "export" / "items.parquet").exists()


def test_serving_from_token_caches(tmp_path: Path, run: Run) -> None:
    lines = run(EXAMPLES / "token_cache.py", tmp_path).splitlines()
    assert "user 3: 90 events in the cache, 15 asked with" in "\n".join(lines)
    whole, cached = re.findall(r"(\d+) \((-?\d\.\d+)\)", lines[-4])
    assert whole[0] == cached[0]
    assert float(whole[1]) == pytest.approx(float(cached[1]), abs=2e-4)
    # 2 layers, 4 summaries a segment, keys and values of 16 numbers.
    assert re.search(r"user 3: \d+ bytes stored, 3072 for 3 segments", lines[-1])


def test_every_example_says_how_to_run_it() -> None:
    for path in EXAMPLES.glob("*.py"):
        opening = path.read_text(encoding="utf-8").split('"""')[1]
        assert f"python examples/{path.name}" in opening, path.name
