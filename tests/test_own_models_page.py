"""The way to a first result, run as docs/own_models.md has it: a script of 40 lines, and what it printed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.test_readme import ROOT

PAGE = (ROOT / "docs" / "own_models.md").read_text(encoding="utf-8")


def test_the_script_of_the_page_gives_its_transcript(tmp_path: Path, python: str) -> None:
    script = re.search(r"```python\n(# first\.py\n.*?)```", PAGE, re.DOTALL)
    shown = re.search(r"```console\n\$ python first\.py\n(.*?)```", PAGE, re.DOTALL)
    assert script is not None
    assert shown is not None
    assert len(script[1].splitlines()) <= 40
    (tmp_path / "first.py").write_text(script[1])
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    ran = subprocess.run(
        [python, "first.py"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check, lines, answer = shown[1].split("...\n")
    assert ran.stdout.startswith(check), ran.stdout
    assert ran.stdout.splitlines()[-1] == answer.strip()
    # Speeds are those of a machine; losses and metrics of the page are those of the script, to the digits shown.
    steps = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in steps if event["event"] == "step"}
    told = re.findall(r"step +(\d+)/60 .*? loss +(\d+\.\d+)", lines)
    assert len(told) >= 3
    for step, loss in told:
        assert abs(losses[int(step)] - float(loss)) < 0.02, (step, loss, losses[int(step)])
    hits = re.search(r"test  step 60  hr@10 (\d\.\d+)", lines)
    assert hits is not None
    assert f"hr@10 {hits[1]}" in ran.stdout
