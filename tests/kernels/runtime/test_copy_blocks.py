"""The copy by a chosen number of blocks copies everything, whatever the size and the number of blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import torch
from freescale.kernels.runtime.copy_blocks import copy_with_blocks
for count, blocks in ((4, 1), (4096, 3), (40_000, 2), (65_536, 16)):
    source = torch.randint(0, 255, (4 * count,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_with_blocks(target, source, blocks=blocks)
    assert torch.equal(target, source), (count, blocks)
try:
    copy_with_blocks(target[:4], source, blocks=1)
except ValueError:
    print("done")
"""


@pytest.mark.timeout(300)
def test_every_byte_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    """In the interpreter, which must be chosen before triton is imported: if it is not, in a process of its own."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        exec(CODE, {})
        assert capsys.readouterr().out == "done\n"
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
