"""A chain of versions: a full export, deltas behind it, and current.json, which says how far they count.

    chain/  base-00000000/   a full export
            delta-00000001/  delta.json, rows.safetensors, model.safetensors, words.parquet where ids are text
            current.json     the base to begin with, and the last version that counts; replaced last

Every version has a fingerprint of its content, and a delta names that of the version it changes and of the one it
makes. So a delta that is missing, doubled, cut off or of another chain is refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data import sync_folder, sync_tree, write_durably
from freescale.errors import CheckpointError, DataError
from freescale.exports.chains.delta_file import FORMAT, VERSION, damaged_chain, read_delta, write_delta
from freescale.exports.chains.row_rounding import Rounded, rounded
from freescale.exports.chains.version import Version, applied, difference, read_version, write_version
from freescale.exports.files.damage import damage_told, is_refusal, refusals_named

CURRENT = "current.json"
_WORK = ".publishing"
ASIDE = ".export-"
"""What names of folders in a chain begin with in which a publisher makes something; it is removed by the next one."""
VECTORS = "vectors"
"""Of a version's manifest: how exact its vectors are, where they are not the run's own."""
INT8 = "int8"


@dataclass(frozen=True, kw_only=True)
class Current:
    """How far a chain counts.

    Args:
        base: number of the version that a full export holds.
        seq: number of the last version.
        fingerprint: its content.
        facts: of that version: steps, windows, and whatever the publisher knows.
    """

    base: int
    seq: int
    fingerprint: str
    facts: Mapping[str, Any]


def is_chain(path: str | Path) -> bool:
    """Whether this folder holds a chain."""
    try:
        said = json.loads((Path(path) / CURRENT).read_text(encoding="utf-8"))
    except OSError as error:
        if is_refusal(error):
            raise
        return False
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("format") == FORMAT


def read_current(chain: Path) -> Current:
    """How far a chain counts now."""
    file = chain / CURRENT
    with damage_told(partial(damaged_chain, file)):
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["format"] != FORMAT or said["version"] != VERSION:
            raise ValueError(f"it is no {FORMAT} of version {VERSION}")
        return Current(
            base=int(said["base"]), seq=int(said["seq"]), fingerprint=said["fingerprint"], facts=said["facts"]
        )


def base_name(seq: int) -> str:
    """Folder of a full export."""
    return f"base-{seq:08d}"


def delta_name(seq: int) -> str:
    """Folder of a delta."""
    return f"delta-{seq:08d}"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What was written of a version.

    Args:
        current: how far the chain counts now.
        num_bytes: of the files.
        changed: items that are new or have another vector; of a base, all.
        deleted: items that are gone.
        num_items: of the version.
    """

    current: Current
    num_bytes: int
    changed: int
    deleted: int
    num_items: int


class Publisher:
    """Writes versions of one model as a chain; one process at a time.

    Args:
        chain: the folder; made with the first version.
        int8: whether vectors are rounded to 8 bits; None: as the chain has them.
    """

    def __init__(self, chain: Path, *, int8: bool | None = None) -> None:
        self.chain = chain
        chain.mkdir(parents=True, exist_ok=True)
        self.current: Current | None = None
        self.version: Version | None = None
        self._int8 = bool(int8)
        if (chain / CURRENT).exists():
            self.current, self.version = load_version(chain)
            self._int8 = self.version.manifest.get(VECTORS) == INT8
            if int8 is not None and int8 != self._int8:
                raise CheckpointError(
                    f"the vectors of this chain are {'rounded to int8' if self._int8 else 'exact'}",
                    got=chain,
                    next_step="publish as before, or into a new folder",
                )
        elif any(
            path.name[0] != "." and path.name not in (base_name(0), f"{CURRENT}.new")
            for path in chain.iterdir()
        ):
            raise CheckpointError(
                "the folder is not empty and not a chain", got=chain, next_step="name another folder"
            )
        self._clean()

    def publish(self, version: Version, facts: Mapping[str, Any]) -> Publication:
        """Make this the last version of the chain, as a delta where there is one before; what that took.

        Renamed first, then named by current.json: killed in between, the next publisher removes it.
        """
        seq = 0 if self.current is None else self.current.seq + 1
        version, in_8_bits = self._as_kept(version)
        changed, deleted = len(version.ids), 0
        name = base_name(seq) if self.version is None else delta_name(seq)
        with self._made(name) as work:
            if self.version is None:
                write_version(work, version)
            else:
                delta = difference(self.version, version)
                changed, deleted = len(delta.ids), len(delta.deleted)
                write_delta(
                    work,
                    delta,
                    seq=seq,
                    parent=self.version.fingerprint,
                    fingerprint=version.fingerprint,
                    facts=facts,
                    rounded=None
                    if in_8_bits is None
                    else in_8_bits.take(np.searchsorted(version.ids, delta.ids)),
                )
            num_bytes = sum(path.stat().st_size for path in work.iterdir())
        base = 0 if self.current is None else self.current.base
        current = Current(base=base, seq=seq, fingerprint=version.fingerprint, facts=dict(facts))
        self._point(current)
        self.version = version
        return Publication(
            current=current,
            num_bytes=num_bytes,
            changed=changed,
            deleted=deleted,
            num_items=len(version.ids),
        )

    def _as_kept(self, version: Version) -> tuple[Version, Rounded | None]:
        """The version as this chain keeps it, and its vectors in 8 bits where it keeps them so.

        Rounded as a whole: a row that has not changed is rounded to what it was, and is not sent again.
        """
        if not self._int8:
            return version, None
        in_8_bits = rounded(version.vectors)
        manifest = {**version.manifest, VECTORS: INT8}
        return replace(version, manifest=manifest, vectors=in_8_bits.vectors()), in_8_bits

    def compact(self) -> Current:
        """Make a base of the last version, with the same fingerprint, and remove what came before it."""
        if self.current is None or self.version is None:
            raise CheckpointError("the chain is empty", got=self.chain)
        if self.current.base != self.current.seq:
            with self._made(base_name(self.current.seq)) as work:
                write_version(work, self.version)
            self._point(replace(self.current, base=self.current.seq))
        self._clean()
        return self.current

    @contextmanager
    def _made(self, name: str) -> Iterator[Path]:
        """A folder to write to, which becomes one of the chain when all is written, and nothing when that fails."""
        work = self.chain / _WORK
        work.mkdir()
        try:
            with refusals_named(work):
                yield work
                sync_tree(work)
                os.rename(work, self.chain / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        sync_folder(self.chain)

    def _point(self, current: Current) -> None:
        said = {"format": FORMAT, "version": VERSION, **asdict(current)}
        write_durably(self.chain / CURRENT, json.dumps(said, indent=1) + "\n")
        self.current = current

    def _clean(self) -> None:
        """Remove what current.json does not name."""
        named = set()
        if self.current is not None:
            named = {base_name(self.current.base)}
            named |= {delta_name(seq) for seq in range(self.current.base + 1, self.current.seq + 1)}
        for path in self.chain.iterdir():
            ours = path.name.startswith(("base-", "delta-")) and path.name not in named
            if ours or path.name == _WORK or path.name.startswith(ASIDE):
                shutil.rmtree(path)
            elif path.name == f"{CURRENT}.new":
                path.unlink()


def load_version(chain: Path) -> tuple[Current, Version]:
    """The last version of a chain: its base, and one delta after the other."""
    for _ in range(3):
        current = read_current(chain)
        try:
            version = _read_base(chain, current.base)
            return current, follow(chain, version, current.base, current)
        except CheckpointError:
            if read_current(chain) == current:
                raise
    raise CheckpointError("the chain changes faster than it can be read", got=chain, next_step="try again")


def follow(chain: Path, version: Version, seq: int, current: Current) -> Version:
    """From version `seq` to the last one, by deltas.

    Raises:
        CheckpointError: a delta is missing, damaged, or of another chain.
    """
    for number in range(seq + 1, current.seq + 1):
        folder = chain / delta_name(number)
        said, delta = read_delta(folder)
        if said["seq"] != number or said["parent"] != version.fingerprint:
            raise damaged_chain(
                folder, f"it follows version {said['seq'] - 1} of another chain, or another version"
            )
        try:
            with damage_told(partial(damaged_chain, folder)):
                version = applied(version, delta)
                found = version.fingerprint
        except DataError as error:
            raise damaged_chain(folder, str(error)) from error
        if found != said["fingerprint"]:
            raise damaged_chain(folder, "it does not make the version that it says")
    if version.fingerprint != current.fingerprint:
        raise damaged_chain(chain / CURRENT, f"version {current.seq} has another fingerprint")
    return version


def _read_base(chain: Path, seq: int) -> Version:
    folder = chain / base_name(seq)
    with damage_told(partial(damaged_chain, folder)):
        said = json.loads((folder / "manifest.json").read_text())["fingerprint"]
        version = read_version(folder)
        found = version.fingerprint  # of all that it holds: words that are none fail here
    if found != said:
        raise damaged_chain(folder, "it holds another version than it says")
    return version
