"""What a damaged file looks like to those who read it, and what is none: no memory, no permission, wrong code."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from freescale.errors import FreeScaleError

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_refusal(error: OSError) -> bool:
    """Whether the machine refused, whatever is in the file: a permission, open files, memory."""
    return error.errno in _REFUSALS


@contextmanager
def damage_told(told: Callable[[str], FreeScaleError]) -> Iterator[None]:
    """Raise `told(why)` for files that are missing, cut off or hold something else; all other errors stay as they are.

    An error with its own next step, a refusal of the machine or a mistake in a model's code is no damage: copying the
    files again, which is what `told` advises, would help none of them.
    """
    import pyarrow as pa
    from safetensors import SafetensorError

    try:
        yield
    except (FreeScaleError, MemoryError):
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, pa.ArrowException) as error:
        if isinstance(error, OSError) and is_refusal(error):
            raise
        raise told(next(iter(str(error).splitlines()), type(error).__name__)) from error
