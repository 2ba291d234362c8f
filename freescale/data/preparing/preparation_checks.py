"""What `prepare` refuses before it begins: options, names of fields, output folders."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from freescale.data.columns.roles import IGNORED
from freescale.data.preparing.reading.raw_format import RawSample
from freescale.data.preparing.reading.raw_input import AUTO, check_format
from freescale.data.stored.manifest import is_dataset
from freescale.errors import DataError


def check_options(format: str, *, separator: str | None, min_events: int, memory_mb: float) -> None:
    """Refuse options that mean nothing."""
    check_format(format)
    if separator is not None and not (separator.isascii() and 1 <= len(separator) <= 4):
        raise DataError(
            "A separator is one to four ASCII characters", got=repr(separator), allowed="such as ',' or '::'"
        )
    if min_events < 1:
        raise DataError("min_events is too small", got=min_events, allowed="1 or more")
    if memory_mb <= 0:
        raise DataError("memory_mb is too small", got=memory_mb, allowed="more than 0; 512 is a good start")


def check_header(source: Path, format: str, header: Sequence[str] | None) -> None:
    """Refuse names of fields that are not, or not needed."""
    if header is None:
        return
    named = [name for name in header if name != IGNORED]
    if len(set(named)) < len(named) or not all(name.strip() for name in header):
        raise DataError(
            "Every field needs a name of its own",
            got=",".join(header),
            allowed="names such as user,item,time,action, and `_` for fields that nobody needs",
        )
    own_names = {
        ".parquet": "parquet",
        ".pq": "parquet",
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".inter": "inter",
    }
    found = own_names.get(RawSample(source).suffix, "csv") if format == AUTO else format
    if found != "csv":
        raise DataError(
            f"Columns are named in their order only for csv; {found} has its own",
            got=source,
            next_step="name single columns with `--user`, `--item`, `--time`, `--action`",
        )


def numbered_actions(actions: Sequence[str] | Mapping[str, float] | None) -> dict[str, float] | None:
    """Word -> number, checked."""
    if actions is None:
        return None
    pairs = (
        list(actions.items())
        if isinstance(actions, Mapping)
        else [(w, float(n)) for n, w in enumerate(actions)]
    )
    words = [word for word, _ in pairs]
    if not words or len(set(words)) < len(words) or not all(words):
        raise DataError(
            "Every action needs a word of its own",
            got=", ".join(words),
            allowed="such as click,cart,purchase",
        )
    return {word: float(number) for word, number in pairs}


def check_target(source: Path, out: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that holds something else."""
    if out == source.resolve() or out in source.resolve().parents:
        raise DataError(
            "The output folder would hold its own input", got=out, next_step="name another folder"
        )
    if out.exists() and not out.is_dir():
        raise DataError(f"The output {out} is a file", next_step="name a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_dataset(out):
        raise DataError(
            f"The output folder {out} is not empty and not a FreeScale data set",
            next_step="name another folder; nothing in it was touched",
        )
    if not overwrite:
        raise DataError(
            f"The output folder {out} already holds a data set",
            next_step="name another folder, or overwrite it (`--overwrite`)",
        )


def io_problem(error: OSError, out: Path) -> DataError:
    """What to tell of a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(
            f"No space left on the disk of {out}",
            got=str(error),
            next_step="free some space (about three times the input), or name a folder on another disk",
        )
    return DataError(
        "The data set could not be written",
        got=str(error),
        next_step=f"check the rights of the input and {out}",
    )
