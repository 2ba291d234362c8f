"""Checkpoints as they lie on disk: which there are, what meta.json says of one, and its tensors read back.

`checkpoint.py` writes them. Loading runs no code from disk, and what is damaged is told with what to do instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from freescale.comm.world import Ranks, fail_together, here
from freescale.data import sync_folder
from freescale.errors import CheckpointError, DamagedCheckpointError, FreeScaleError, in_one_line
from freescale.train.state.shard_reader import (
    ChangedError,
    DoesNotFitError,
    crc_of_file,
    fill,
    index_of_headers,
)
from freescale.train.state.shards import BLOCK
from freescale.version import __version__

FORMAT = 2
_READABLE = (1, FORMAT)  # 1 was written by torch.distributed.checkpoint
META = "meta.json"
BEST = "best.json"
_NAME = re.compile(r"step-\d{8,}")
BAD = ".bad"
"""What the name of a checkpoint ends with that was put aside because it cannot be resumed from."""


def saved_in(folder: Path) -> list[Path]:
    """All complete checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def best_in(folder: Path) -> Path | None:
    """The checkpoint of a folder with the best evaluation, or the newest one when none was evaluated."""
    saved = saved_in(folder)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        step = int(json.loads((folder / BEST).read_text())["step"])
        saved = [path for path in saved if step_of(path) == step] or saved
    return saved[-1] if saved else None


def step_of(path: Path) -> int:
    """Steps a checkpoint has behind it, by its name."""
    return int(path.name.removeprefix("step-"))


def put_aside(path: Path) -> Path:
    """Give a checkpoint that cannot be resumed from another name, so that its step can be written again."""
    aside = path.with_name(path.name + BAD)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    sync_folder(path.parent)
    return aside


def read_meta(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, if they are undamaged and every shard is there with its size; reads no shard."""
    try:
        meta = _checked(json.loads((path / META).read_text()))
        if meta["format"] not in _READABLE:
            raise CheckpointError(
                "the checkpoint was written in another format",
                got=f"{path.name}: format {meta['format']}, written by freescale {meta.get('freescale')}",
                allowed=f"format {', '.join(map(str, _READABLE))} (freescale {__version__})",
            )
        if meta["format"] == 1:
            whole = {str(name): (int(size), int(crc)) for name, (size, crc) in meta["files"].items()}
            meta["files"] = {
                name: {"size": size, "block": BLOCK, "crcs": [], "crc": crc}
                for name, (size, crc) in whole.items()
            }
        sizes = {str(name): int(facts["size"]) for name, facts in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"{META} cannot be read ({type(error).__name__})") from None
    for name, size in sizes.items():
        if not (path / name).exists():
            raise damaged(path, f"{name} is missing")
        if not has_size(path / name, size):
            raise damaged(path, f"{name} has changed since it was written")
    return meta


def load_tensors(path: Path, tensors: Mapping[str, Tensor], *, ranks: Ranks) -> None:
    """Fill these tensors (plain or sharded) in place from a checkpoint; what one rank cannot read, all refuse."""
    failure: Exception | None = None
    try:
        meta = read_meta(path)
        if meta["format"] == 1:
            _check_first_format(path, meta, ranks=ranks)
        fill(path, meta, tensors)
    except ChangedError as error:
        failure = damaged(path, str(error))
    except DoesNotFitError as error:
        failure = CheckpointError(
            "the checkpoint does not fit this model",
            got=f"{path}: {error}",
            next_step="use the recipe the run was started with (RUN_DIR/config.yaml), and the version of FreeScale",
        )
    except FreeScaleError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(
            f"the checkpoint cannot be read by {here(ranks)}",
            got=f"{path}: {in_one_line(error)}",
            next_step="see that every machine can read run.out",
        )
        failure.__cause__ = error
    fail_together(failure, ranks=ranks, what="load a checkpoint")


def damaged(path: Path, why: str) -> DamagedCheckpointError:
    """What is said of a checkpoint that cannot be resumed from, and what to do instead."""
    others = [other for other in saved_in(path.parent) if other != path]
    before = [other for other in others if step_of(other) < step_of(path)]
    instead = (before or others)[-1:]
    which = "the one before it" if before else "a later one"
    return DamagedCheckpointError(
        f"the checkpoint {path} is damaged: {why}",
        next_step=f"`freescale train` with the run's recipe goes on from {which}: --resume {instead[0]}"
        if instead
        else "start again: --resume never",
    )


def _check_first_format(path: Path, meta: dict[str, Any], *, ranks: Ranks) -> None:
    """Shards of format 1 have one CRC: each is checked by one rank, for all."""
    for name, facts in list(meta["files"].items())[ranks.rank :: ranks.num_ranks]:
        if crc_of_file(path / name) != facts["crc"]:
            raise ChangedError(f"{name} has changed since it was written")
    meta["tensors"] = index_of_headers(path, meta["files"])


def has_size(path: Path, size: int) -> bool:
    """Whether a file is there with all its bytes."""
    return path.exists() and path.stat().st_size == size


def with_crc(facts: Mapping[str, Any]) -> str:
    """meta.json, which ends with a CRC of the rest."""
    return json.dumps({**facts, "crc": _crc_of(facts)}, indent=1)


def _checked(facts: Any) -> dict[str, Any]:
    if facts["format"] == FORMAT and facts.pop("crc") != _crc_of(facts):
        raise ValueError("meta.json has changed since it was written")
    return dict(facts)


def _crc_of(facts: Mapping[str, Any]) -> int:
    as_read = json.loads(json.dumps(facts))
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())
