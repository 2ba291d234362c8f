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
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freescale.data import sync_folder, sync_tree, write_durably
from freescale.errors import CheckpointError
from freescale.train.state.version import Delta, Version, applied, difference, read_version, write_version

CURRENT = "current.json"
FORMAT = "freescale-chain"
_VERSION = 1
_WORK = ".publishing"
ASIDE = ".export-"
"""What names of folders in a chain begin with in which a publisher makes something; it is removed by the next one."""
_DELTA, _ROWS, _MODEL, _WORDS = "delta.json", "rows.safetensors", "model.safetensors", "words.parquet"


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
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("format") == FORMAT


def read_current(chain: Path) -> Current:
    """How far a chain counts now."""
    file = chain / CURRENT
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["format"] != FORMAT or said["version"] != _VERSION:
            raise ValueError(f"it is no {FORMAT} of version {_VERSION}")
        return Current(
            base=int(said["base"]), seq=int(said["seq"]), fingerprint=said["fingerprint"], facts=said["facts"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged_chain(file, str(error)) from error


def base_name(seq: int) -> str:
    """Folder of a full export."""
    return f"base-{seq:08d}"


def delta_name(seq: int) -> str:
    """Folder of a delta."""
    return f"delta-{seq:08d}"


class Publisher:
    """Writes versions of one model as a chain; one process at a time.

    Args:
        chain: the folder; made with the first version.
    """

    def __init__(self, chain: Path) -> None:
        self.chain = chain
        chain.mkdir(parents=True, exist_ok=True)
        self.current: Current | None = None
        self.version: Version | None = None
        if (chain / CURRENT).exists():
            self.current, self.version = load_version(chain)
        elif any(
            path.name[0] != "." and path.name not in (base_name(0), f"{CURRENT}.new")
            for path in chain.iterdir()
        ):
            raise CheckpointError(
                "the folder is not empty and not a chain", got=chain, next_step="name another folder"
            )
        self._clean()

    def publish(self, version: Version, facts: Mapping[str, Any]) -> tuple[Current, int]:
        """Make this the last version of the chain, as a delta where there is one before; how many bytes that took.

        Renamed first, then named by current.json: killed in between, the next publisher removes it.
        """
        seq = 0 if self.current is None else self.current.seq + 1
        work = self.chain / _WORK
        work.mkdir()
        if self.version is None:
            write_version(work, version)
            name = base_name(seq)
        else:
            delta = difference(self.version, version)
            _write_delta(
                work,
                delta,
                seq=seq,
                parent=self.version.fingerprint,
                fingerprint=version.fingerprint,
                facts=facts,
            )
            name = delta_name(seq)
        sync_tree(work)
        num_bytes = sum(path.stat().st_size for path in work.iterdir())
        os.rename(work, self.chain / name)
        sync_folder(self.chain)
        base = 0 if self.current is None else self.current.base
        self._point(Current(base=base, seq=seq, fingerprint=version.fingerprint, facts=dict(facts)))
        self.version = version
        assert self.current is not None
        return self.current, num_bytes

    def compact(self) -> Current:
        """Make a base of the last version, with the same fingerprint, and remove what came before it."""
        if self.current is None or self.version is None:
            raise CheckpointError("the chain is empty", got=self.chain)
        if self.current.base != self.current.seq:
            work = self.chain / _WORK
            work.mkdir()
            write_version(work, self.version)
            sync_tree(work)
            os.rename(work, self.chain / base_name(self.current.seq))
            sync_folder(self.chain)
            current = self.current
            self._point(
                Current(
                    base=current.seq, seq=current.seq, fingerprint=current.fingerprint, facts=current.facts
                )
            )
        self._clean()
        return self.current

    def _point(self, current: Current) -> None:
        said = {"format": FORMAT, "version": _VERSION, **asdict(current)}
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
        said, delta = _read_delta(folder)
        if said["seq"] != number or said["parent"] != version.fingerprint:
            raise damaged_chain(
                folder, f"it follows version {said['seq'] - 1} of another chain, or another version"
            )
        try:
            version = applied(version, delta)
        except ValueError as error:
            raise damaged_chain(folder, str(error)) from error
        if version.fingerprint != said["fingerprint"]:
            raise damaged_chain(folder, "it does not make the version that it says")
    if version.fingerprint != current.fingerprint:
        raise damaged_chain(chain / CURRENT, f"version {current.seq} has another fingerprint")
    return version


def _read_base(chain: Path, seq: int) -> Version:
    folder = chain / base_name(seq)
    try:
        said = json.loads((folder / "manifest.json").read_text())["fingerprint"]
        version = read_version(folder)
    except Exception as error:
        raise damaged_chain(folder, next(iter(str(error).splitlines()), type(error).__name__)) from error
    if version.fingerprint != said:
        raise damaged_chain(folder, "it holds another version than it says")
    return version


def _write_delta(
    folder: Path, delta: Delta, *, seq: int, parent: str, fingerprint: str, facts: Mapping[str, Any]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    rows = {"ids": delta.ids, "vectors": delta.vectors, "deleted": delta.deleted}
    save_arrays({name: np.ascontiguousarray(values) for name, values in rows.items()}, folder / _ROWS)
    save_file({name: value.contiguous() for name, value in delta.dense.items()}, folder / _MODEL)
    if delta.words is not None:
        pq.write_table(pa.table({"word": delta.words}), folder / _WORDS)
    files = {path.name: [path.stat().st_size, _crc(path)] for path in sorted(folder.iterdir())}
    said = {
        "format": FORMAT,
        "version": _VERSION,
        "seq": seq,
        "parent": parent,
        "fingerprint": fingerprint,
        "changed": len(delta.ids),
        "deleted": len(delta.deleted),
        "facts": dict(facts),
        "files": files,
        "manifest": dict(delta.manifest),
    }
    (folder / _DELTA).write_text(json.dumps(said, indent=1))


def _read_delta(folder: Path) -> tuple[dict[str, Any], Delta]:
    """A delta, its files compared with what delta.json says of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file as load_arrays
    from safetensors.torch import load_file

    if not folder.exists():
        raise damaged_chain(folder, "it is not there")
    try:
        said = json.loads((folder / _DELTA).read_text())
        for name, (size, crc) in said["files"].items():
            path = folder / Path(name).name
            if path.stat().st_size != size or _crc(path) != crc:
                raise ValueError(f"{name} is not as it was written")
        rows = load_arrays(folder / _ROWS)
        words = None
        if _WORDS in said["files"]:
            words = pq.read_table(folder / _WORDS).column("word").cast(pa.large_string()).combine_chunks()
            words = pa.concat_arrays(words.chunks) if isinstance(words, pa.ChunkedArray) else words
        manifest = said["manifest"]
        dense = load_file(folder / _MODEL)
        return said, Delta(manifest, dense, rows["ids"], rows["vectors"], rows["deleted"], words)
    except Exception as error:
        raise damaged_chain(folder, next(iter(str(error).splitlines()), type(error).__name__)) from error


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def damaged_chain(path: Path, why: str) -> CheckpointError:
    """The error of a part of a chain that cannot be trusted."""
    return CheckpointError(
        f"{path} is missing, damaged or of another chain",
        got=why,
        next_step="copy the chain again, or publish into a new folder",
    )
