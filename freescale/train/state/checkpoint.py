"""Checkpoints: one safetensors shard a rank, written in the background, whole or not there.

A checkpoint is written to `step-N.tmp` and renamed when all bytes of all ranks are on disk, so a folder called `step-N`
is whole. Tensors are in the shards, everything else is in meta.json: which rows of which tensor lie where, the size and
the CRCs of each file, and a CRC of its own (`saved.py` reads them). Rows are saved by their number in the whole tensor,
so any number of ranks can load what any number saved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.comm.world import Ranks, fail_together, from_first, gather, here
from freescale.data import sync_folder, write_durably
from freescale.embedding import EmbeddingTable
from freescale.errors import CheckpointError, DamagedCheckpointError, FreeScaleError, in_one_line
from freescale.train.state.saved import (
    BEST,
    FORMAT,
    META,
    best_in,
    has_size,
    put_aside,
    read_meta,
    saved_in,
    step_of,
    with_crc,
)
from freescale.train.state.shards import describe_pieces, pieces_to_write, write_shard
from freescale.train.state.shared_folder import appears, check_shared
from freescale.train.state.snapshot import Snapshot, Staging
from freescale.version import __version__


class Checkpoints:
    """The checkpoints of one run folder. Nothing is written before `open`, which the one training of a folder calls.

    Args:
        folder: RUN_DIR/checkpoints.
        ranks: who takes part; rank 0 does the renaming and the pruning.
        keep: latest checkpoints to keep, besides the best one.
    """

    def __init__(self, folder: str | Path, *, ranks: Ranks, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.begun_from: str | None = None
        """Checkpoint of another run that this one started from; those written here tell it."""
        self._ranks = ranks
        self._is_open = False
        self._staging = Staging()
        self._writing: threading.Thread | None = None
        self._target: Path | None = None
        self._failure: Exception | None = None

    def open(self) -> None:
        """Take the folder into use: make it, see that all ranks share it, remove what a killed run left half done."""
        if self._is_open:
            return
        from_first(self._clean, ranks=self._ranks, what="open the run folder")
        check_shared(self.folder, ranks=self._ranks)
        self._is_open = True

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory ready for tensors of a GPU, so that the first save takes no longer than the next."""
        if self._ranks.device.type == "cuda":
            pieces = pieces_to_write(tensors, ranks=self._ranks)
            num_bytes = sum(piece.num_bytes for piece in pieces)
            self._staging.reserve(num_bytes, device=self._ranks.device)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        best: bool = False,
        tables: Iterable[EmbeddingTable] = (),
    ) -> None:
        """Begin to write a checkpoint; returns once training may change the tensors.

        Args:
            step: steps behind it.
            tensors: by name; plain ones are the same on every rank, DTensors are cut by rows.
            meta: what else to keep, for JSON.
            best: whether this is the best state so far.
            tables: tables of these tensors that change by their own methods alone: need not be copied aside on a CPU.
        """
        self.wait()
        self.open()
        final = self.folder / f"step-{step:08d}"
        if from_first(lambda: self._begin(final), ranks=self._ranks, what="begin a checkpoint"):
            if best and self._ranks.is_first:
                self.mark_best(step, meta.get("best", {}))
            return
        facts = {**meta, "format": FORMAT, "freescale": __version__, "torch": torch.__version__, "step": step}
        if self.begun_from is not None:
            facts["begun_from"] = self.begun_from
        snapshot, failure = None, None
        try:
            pieces = pieces_to_write(tensors, ranks=self._ranks)
            snapshot = Snapshot(pieces, tables, self._staging)
        except (OSError, MemoryError, FreeScaleError) as error:
            failure = self._not_written(final, error)
        fail_together(failure, ranks=self._ranks, what="begin a checkpoint")
        self._target = final
        self._writing = threading.Thread(target=self._finish, args=(snapshot, final, facts, best))
        self._writing.start()

    def forget_after(self, step: int) -> None:
        """Drop checkpoints later than a step: the run goes on from there and will write them anew."""
        if self._ranks.is_first:
            for path in self.complete():
                if step_of(path) > step:
                    shutil.rmtree(path, ignore_errors=True)
        self._ranks.barrier()

    def finished(self) -> Path | None:
        """A checkpoint that has reached the disk since the last call; raises if it could not be written."""
        if self._writing is None or self._writing.is_alive():
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Until the checkpoint on its way is on disk, all of it; raises if it could not be written."""
        if self._writing is None:
            return None
        self._writing.join()
        self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._target

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return next(iter(reversed(self.complete())), None)

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, or the newest one when none was evaluated."""
        return best_in(self.folder)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return saved_in(self.folder)

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """Note which checkpoint is the best; rank 0 alone."""
        write_durably(self.folder / BEST, json.dumps({"step": step, **best}))

    def unmark_best(self) -> None:
        """No checkpoint is the best; rank 0 alone."""
        (self.folder / BEST).unlink(missing_ok=True)
        sync_folder(self.folder)

    def _clean(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            for probe in self.folder.glob(".shared-*"):
                probe.unlink(missing_ok=True)
            sync_folder(self.folder.parent)
        except OSError as error:
            raise CheckpointError(
                "run.out cannot be written",
                got=f"{self.folder}: {error.strerror}",
                next_step="make the folder writable, or choose another run.out",
            ) from error

    def _begin(self, final: Path) -> bool:
        """True if a run that came this far before has left this checkpoint, whole; else there is room for it now."""
        staged = final.with_suffix(".tmp")
        try:
            if final.exists():
                with contextlib.suppress(DamagedCheckpointError):
                    read_meta(final)
                    return True
                put_aside(final)
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
        except OSError as error:
            raise self._not_written(final, error) from error
        return False

    def _finish(self, snapshot: Snapshot, final: Path, facts: dict[str, Any], best: bool) -> None:
        """In the background: write this rank's shard; when all have, rank 0 seals the folder and all are told."""
        try:
            self._write(snapshot, final, facts, best)
        except Exception as error:
            self._failure = error

    def _write(self, snapshot: Snapshot, final: Path, facts: dict[str, Any], best: bool) -> None:
        staged, group = final.with_suffix(".tmp"), self._ranks.background
        written, failure = {}, None
        try:
            written = self._write_shard(snapshot, staged)
        except Exception as error:
            failure = self._not_written(final, error)
        finally:
            snapshot.close()
        shards = gather(written, group=group, what="report shards")
        try:
            fail_together(failure, ranks=self._ranks, what="report shards", group=group)
            if self._ranks.is_first:
                try:
                    self._seal(staged, final, {**facts, **merge(shards)}, shards)
                    if best:
                        self.mark_best(facts["step"], facts.get("best", {}))
                    self._prune()
                except Exception as error:
                    failure = self._not_written(final, error)
            fail_together(failure, ranks=self._ranks, what="seal the checkpoint", group=group)
        except FreeScaleError:
            if self._ranks.is_first:
                shutil.rmtree(staged, ignore_errors=True)
            raise

    def _write_shard(self, snapshot: Snapshot, staged: Path) -> dict[str, Any]:
        """This rank's file; returns what meta.json says of it."""
        file = f"shard-{self._ranks.rank:05d}.safetensors"
        facts = write_shard(staged / file, snapshot.sources)
        tensors = describe_pieces(snapshot.pieces, snapshot.positions, file)
        return {"files": {file: facts}, "tensors": tensors, "where": here(self._ranks)}

    def _seal(self, staged: Path, final: Path, facts: dict[str, Any], shards: list[dict[str, Any]]) -> None:
        """See that every shard is here, write meta.json, give the folder its name; all of it durable."""
        for shard in shards:
            for file, known in shard["files"].items():
                if not appears(lambda: has_size(staged / file, known["size"]), folder=staged):  # noqa: B023
                    if not staged.is_dir():
                        raise FileNotFoundError(errno.ENOENT, "removed while it was written", str(staged))
                    raise CheckpointError(
                        f"rank 0 does not see the shard that {shard['where']} has written", got=staged / file
                    )
        write_durably(staged / META, with_crc(facts))
        os.replace(staged, final)
        sync_folder(self.folder)

    def _not_written(self, final: Path, error: BaseException) -> CheckpointError:
        kept = [path for path in self.complete() if path != final]
        mend = _MENDS.get(getattr(error, "errno", None), "see to the disk")
        again = "run the same command again" + (f"; it resumes from {kept[-1].name}" if kept else "")
        failure = CheckpointError(
            f"the checkpoint {final.name} could not be written",
            got=f"{here(self._ranks)}: {in_one_line(error)}",
            next_step=f"{mend} and {again}",
        )
        failure.__cause__ = error
        return failure

    def _prune(self) -> None:
        best = self.best()
        for path in self.complete()[: -self.keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


_MENDS: dict[int | None, str] = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EROFS: "make run.out writable",
    errno.EACCES: "make run.out writable",
    errno.EPERM: "make run.out writable",
    errno.ENOENT: "keep run.out where it is while a run goes on",
}


def merge(shards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What meta.json says of all shards together; refuses pieces that do not make up whole tensors."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for shard in shards:
        files |= shard["files"]
        for name, facts in shard["tensors"].items():
            known = tensors.setdefault(name, {**facts, "pieces": []})
            known["pieces"] += facts["pieces"]
    for name, facts in tensors.items():
        rows = sum(rows for _, _, rows, _ in facts["pieces"])
        if rows != (facts["shape"][0] if facts["shape"] else 1):
            raise CheckpointError(
                f"the ranks have not written all of {name}", got=f"{rows} rows of {facts['shape']}"
            )
    return {"files": files, "tensors": tensors}
