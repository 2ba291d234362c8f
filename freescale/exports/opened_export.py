"""A folder of an export or of a chain, opened for those who ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from freescale import registry
from freescale.errors import CheckpointError, ConfigError
from freescale.exports.chain_model import ChainModel
from freescale.exports.chains.chain import is_chain
from freescale.exports.export_reader import read_export
from freescale.exports.exported_model import ExportedModel
from freescale.exports.files.damage import damage_told

_AGAIN = "`freescale export RUN_DIR OUT_DIR`"


def load_export(
    path: str | Path,
    *,
    plugins: Sequence[str] = (),
    encoder: torch.nn.Module | None = None,
    head: torch.nn.Module | None = None,
) -> ExportedModel | ChainModel:
    """Read an exported folder, or the last version of a chain of them; runs no code from it.

    Args:
        path: the folder.
        plugins: modules that register the encoder or the head, where the model has one from outside; they are imported.
        encoder: one as the `Trainer` was given, where it was an object; it is filled with the exported weights.
        head: the same.
    """
    for module in plugins:
        registry.load_plugin(module)
    if is_chain(path):
        if encoder is not None or head is not None:
            raise CheckpointError(
                "a chain is served by kinds that have names",
                got="objects as encoder or head",
                next_step="register them (`--plugin`, plugins=[MODULE])",
            )
        return ChainModel(path)
    try:
        with damage_told(lambda why: _unreadable(path, why)):
            return read_export(Path(path), encoder, head)
    except ConfigError as error:
        why = error.what if error.got is None else f"{error.what}: {error.got}"
        raise _unreadable(path, why, allowed=error.allowed, next_step=_with_code(error)) from error


def _unreadable(
    path: str | Path, why: str, *, allowed: object = None, next_step: str = _AGAIN
) -> CheckpointError:
    return CheckpointError(
        "this is not a readable FreeScale export", got=f"{path}: {why}", allowed=allowed, next_step=next_step
    )


def _with_code(error: ConfigError) -> str:
    """What to do about an export whose code is not here."""
    if error.next_step is not None and "load_export(path" in error.next_step:
        return error.next_step
    return f"load_export(path, plugins=[MODULE]) with what registers it, or {_AGAIN}"
