"""The copy by a chosen number of blocks copies everything, whatever the size and the number of blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

CODE = """
import sys
import torch
from freescale.kernels.runtime.copy_blocks import copy_with_blocks
device = sys.argv[1]
for count, blocks in ((4, 1), (4096, 3), (40_000, 2), (65_536, 16)):
    source = torch.randint(0, 255, (4 * count,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_with_blocks(target, source, blocks=blocks)
    assert torch.equal(target, source), (count, blocks)
try:
    copy_with_blocks(target[:4], source, blocks=1)
except ValueError:
    print("done")
"""


@pytest.mark.timeout(300)
def test_every_byte_is_copied() -> None:
    """On a GPU, else in the interpreter, which must be chosen before triton is imported: in a process of its own."""
    on_gpu = torch.cuda.is_available()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, "cuda" if on_gpu else "cpu"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment if on_gpu else {**environment, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
