"""Checkpoints: torch.distributed.checkpoint into safetensors shards, in the background, never half there.

A checkpoint is written to `step-N.tmp` and renamed when every byte is on disk, so a folder called `step-N` is whole.
It holds tensors in safetensors files and everything else in meta.json with the size and CRC of each file: loading
runs no code from disk. Tables are saved as global tensors, so any number of ranks can load what any number saved.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from freescale import __version__
from freescale.comm.world import Ranks
from freescale.errors import CheckpointError

FORMAT = 1
# A run of one rank has no process group on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_META = "meta.json"
_BEST = "best.json"
# What can go wrong while torch reads or writes; its own exception is no Exception.
_FAILURES = (Exception, CheckpointException)


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: RUN_DIR/checkpoints.
        ranks: who takes part; rank 0 does the renaming and the pruning.
        keep: latest checkpoints to keep, besides the best one.
    """

    def __init__(self, folder: str | Path, *, ranks: Ranks, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._ranks = ranks
        self._writing: threading.Thread | None = None
        self._target: Path | None = None
        self._failure: Exception | None = None
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        ranks.barrier()

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, best: bool = False
    ) -> None:
        """Begin to write a checkpoint; returns once the tensors are copied aside, so training may change them."""
        self.wait()
        final = self.folder / f"step-{step:08d}"
        if self._is_there(final):
            if best:
                self._mark_best(step, meta)
            return
        staged = final.with_suffix(".tmp")
        try:
            writer = HuggingFaceStorageWriter(str(staged), save_distributed=True)
            pending = async_save(dict(tensors), storage_writer=writer, process_group=self._ranks.background)
        except _FAILURES as error:
            self._raise(error, staged)
        facts = {**meta, "format": FORMAT, "freescale": __version__, "torch": torch.__version__, "step": step}
        self._writing = threading.Thread(target=self._finish, args=(pending, staged, final, facts, best))
        self._target = final
        self._writing.start()

    def forget_after(self, step: int) -> None:
        """Drop checkpoints later than a step: the run goes on from there and will write them anew."""
        if self._ranks.is_first:
            for path in self.complete():
                if int(path.name.removeprefix("step-")) > step:
                    shutil.rmtree(path, ignore_errors=True)
        self._ranks.barrier()

    def finished(self) -> Path | None:
        """A checkpoint that has reached the disk since the last call; raises if it could not be written."""
        if self._writing is None or self._writing.is_alive():
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Until the checkpoint on its way is on disk; raises if it could not be written."""
        if self._writing is None:
            return None
        self._writing.join()
        self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._target

    def wait_on_all_ranks(self) -> Path | None:
        """The same on every rank: afterwards all of them see the same finished checkpoints."""
        path = self.wait()
        self._ranks.barrier()
        return path

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(iter(reversed(self.complete())), None)

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, or the newest one when none was evaluated."""
        try:
            step = int(json.loads((self.folder / _BEST).read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return self.latest()
        path = self.folder / f"step-{step:08d}"
        return path if path.exists() else self.latest()

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != ".tmp")

    def _is_there(self, final: Path) -> bool:
        """Whether a run that came this far before has left this checkpoint, whole; rank 0 looks, for all to agree."""
        found = torch.zeros(1)
        if self._ranks.is_first and final.exists():
            try:
                read_meta(final)
                found += 1
            except CheckpointError:
                shutil.rmtree(final, ignore_errors=True)
        return bool(self._ranks.sum_on_cpu(found))

    def _finish(self, pending: Any, staged: Path, final: Path, facts: dict[str, Any], best: bool) -> None:
        """In the background: wait for the shards, seal the folder, rename it, prune old ones."""
        try:
            pending.result()
            if self._ranks.is_first:
                _seal(staged, facts)
                os.replace(staged, final)
                if best:
                    self._mark_best(facts["step"], facts)
                self._prune()
        except _FAILURES as error:
            try:
                self._raise(error, staged)
            except CheckpointError as failure:
                self._failure = failure

    def _raise(self, error: BaseException, staged: Path) -> None:
        shutil.rmtree(staged, ignore_errors=True)
        kept = self.complete()
        raise CheckpointError(
            f"the checkpoint {staged.stem} could not be written",
            got=_root_cause(error),
            next_step=f"free disk space and run the same command again; it resumes from {kept[-1].name}"
            if kept
            else "free disk space and run the same command again",
        ) from error

    def _mark_best(self, step: int, meta: Mapping[str, Any]) -> None:
        if self._ranks.is_first:
            temporary = self.folder / (_BEST + ".new")
            temporary.write_text(json.dumps({"step": step, **dict(meta.get("best", {}))}))
            os.replace(temporary, self.folder / _BEST)

    def _prune(self) -> None:
        best = self.best()
        for path in self.complete()[: -self.keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def read_meta(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, after checking that every shard is there and undamaged."""
    try:
        meta = json.loads((path / _META).read_text())
        if meta["format"] != FORMAT:
            raise CheckpointError(
                "the checkpoint was written in another format",
                got=f"{path.name}: format {meta['format']}, written by freescale {meta.get('freescale')}",
                allowed=f"format {FORMAT} (freescale {__version__})",
            )
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{_META} cannot be read ({type(error).__name__})") from None
    for name, (size, crc) in files.items():
        shard = path / name
        if not shard.exists():
            raise _damaged(path, f"{name} is missing")
        if shard.stat().st_size != size or _crc(shard) != crc:
            raise _damaged(path, f"{name} has changed since it was written")
    return meta


def load_tensors(path: Path, tensors: Mapping[str, Tensor], *, ranks: Ranks) -> None:
    """Fill these tensors (plain or sharded) in place from a checkpoint."""
    try:
        load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(path)),
            process_group=ranks.background,
            no_dist=ranks.background is None,
        )
    except _FAILURES as error:
        raise CheckpointError(
            "the checkpoint does not fit this model",
            got=f"{path}: {_root_cause(error)}",
            next_step="use the recipe the run was started with (RUN_DIR/config.yaml)",
        ) from error


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write meta.json with the size and CRC of every shard, and make all of it durable."""
    shards = sorted(path for path in folder.iterdir() if path.is_file())
    facts = {**facts, "files": {path.name: [path.stat().st_size, _crc(path)] for path in shards}}
    with open(folder / _META, "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _damaged(path: Path, why: str) -> CheckpointError:
    others = sorted(p for p in path.parent.glob("step-*") if p.suffix != ".tmp" and p.name < path.name)
    return CheckpointError(
        f"the checkpoint {path} is damaged: {why}",
        next_step=f"resume from the one before it: --resume {others[-1]}"
        if others
        else "start again: --resume never",
    )


def _root_cause(error: BaseException) -> str:
    """The innermost reason, in one line; torch wraps the failures of all ranks in one exception."""
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
