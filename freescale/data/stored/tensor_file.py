"""Files of tensors (safetensors) with the mode and the errors of any other file.

The library writes through a private file of its own, so that nobody else could read what came of it; and it tells what
the system refuses in its own words: a full disk as an error of serializing, a missing permission as a missing file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

_REFUSED = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors; it gets the mode that the umask gives."""
    from safetensors.torch import save_file

    _write(path, save_file, {name: each.contiguous() for name, each in tensors.items()})


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """The same, of arrays."""
    from safetensors.numpy import save_file

    _write(path, save_file, {name: np.ascontiguousarray(each) for name, each in arrays.items()})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` has written."""
    from safetensors.torch import load_file

    with path.open("rb"):  # the library calls what may not be read missing
        return load_file(path)


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """What `write_arrays` has written."""
    from safetensors.numpy import load_file

    with path.open("rb"):
        return load_file(path)


def _write(path: Path, save: Callable[[Any, Path], None], content: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError

    path.touch()
    mode = path.stat().st_mode
    try:
        save(content, path)
    except SafetensorError as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        number = int(refused[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(mode)
