"""Which TorchRec the bridge was tried with; others are refused."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from freescale.errors import FreeScaleError, in_one_line

TORCHREC = "1.9.2"
"""With torch 2.13.0 and fbgemm-gpu-cpu 1.8.0, all installed with --no-deps: torchrec asks for fbgemm's CUDA build."""


def require_torchrec() -> Any:
    """The package.

    Raises:
        FreeScaleError: it is not there, cannot be imported, or is another version than the bridge was tried with.
    """
    wanted = f"pip install --no-deps torchrec=={TORCHREC} fbgemm-gpu-cpu==1.8.0 (torch 2.13.0)"
    try:
        found = importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        raise FreeScaleError(
            "this needs TorchRec, which is not installed", allowed=TORCHREC, next_step=wanted
        ) from None
    if found != TORCHREC:
        raise FreeScaleError(
            "the bridge has not been tried with this TorchRec", got=found, allowed=TORCHREC, next_step=wanted
        )
    try:
        return importlib.import_module("torchrec")
    except Exception as error:
        raise FreeScaleError(
            "TorchRec cannot be imported; its versions of torch and fbgemm must fit",
            got=in_one_line(error),
            next_step=wanted,
        ) from error
