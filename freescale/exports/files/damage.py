"""What a damaged file looks like to those who read it, and what is none: no memory, permission or room, wrong code."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from freescale.errors import FreeScaleError

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_SILENCE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_LOOKS_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def is_refusal(error: OSError) -> bool:
    """Whether the machine refused, whatever is in the file: a permission, open files, memory, a disk that is away."""
    return error.errno in _REFUSALS + _SILENCE


@contextmanager
def no_damage() -> Iterator[None]:
    """What fails inside, in the code of somebody's own model, is no damage of the files that it is made from."""
    try:
        yield
    except Exception as error:
        error._no_damage = True  # type: ignore[attr-defined]
        raise


@contextmanager
def damage_told(told: Callable[[str], FreeScaleError]) -> Iterator[None]:
    """Raise `told(why)` for files that are missing, cut off or hold something else; all other errors stay as they are.

    An error with its own next step, a refusal of the machine or a mistake in a model's code (`no_damage`) is none:
    copying the files again, which is what `told` advises, would help none of them.
    """
    import pyarrow as pa
    from safetensors import SafetensorError

    try:
        yield
    except (FreeScaleError, MemoryError):
        raise
    except (*_LOOKS_DAMAGED, SafetensorError, pa.ArrowException) as error:
        if hasattr(error, "_no_damage") or (isinstance(error, OSError) and is_refusal(error)):
            raise
        raise told(_in_words(error)) from error


@contextmanager
def refusals_named(folder: Path) -> Iterator[None]:
    """What the system refuses to those who write here names the folder, where it names no file: a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(folder)) from error


def _in_words(error: Exception) -> str:
    """The first line of an error; a bare key says that it is missing."""
    if isinstance(error, KeyError) and error.args:
        key = str(error.args[0])
        return key if " " in key else f"there is no {key!r} where one is needed"
    return next(iter(str(error).splitlines()), type(error).__name__)
