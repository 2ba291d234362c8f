"""Files and folders as an origin: files are known by their contents, under any name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from freescale.data.log.origin import Words, nothing_new, unfinished
from freescale.data.preparing.reading.input_files import all_files
from freescale.data.stored.digest import sample_file
from freescale.data.stored.storage import is_address, local_path
from freescale.errors import DataError
from freescale.registry import register

_BLOCKS = 64
"""Of 64 KiB that stand for a file; one of at most 4 MiB is read whole."""


@dataclass(frozen=True)
class OriginFile:
    """One file of raw input.

    Args:
        name: its path below the input.
        size: in bytes.
        digest: of its contents, of a large file of parts of it.
    """

    name: str
    size: int
    digest: str


@register("origin", "files")
class Files:
    """A file, or all files of a folder.

    Args:
        where: its path.
    """

    kind = "files"

    def __init__(self, where: str) -> None:
        if is_address(where):
            raise DataError(
                "A log is sealed on this machine, from files of this machine",
                got=where,
                next_step="copy the files here first",
            )
        self.path = local_path(where)
        self._files = _look_at(self.path)
        self._named: dict[str, str] = {}

    def describe(self) -> str:
        """Its path."""
        return str(self.path)

    def new(self, before: list[Words]) -> Words:
        """Files that are not in the log yet; DataError where all of them are, or one that is was changed since."""
        sealed: dict[str, int] = {}
        names: dict[str, tuple[OriginFile, int]] = {}
        for words in before:
            for known in (OriginFile(**each) for each in words["files"]):
                sealed[known.digest] = words["window"]
                names[known.name] = known, words["window"]
        fresh = []
        for file in self._files:
            if file.digest in sealed:
                continue
            if self.path.is_dir() and file.name in names:
                known, number = names[file.name]
                raise DataError(
                    f"{self.path / file.name} was changed after it was sealed in window {number}",
                    got=f"{file.size:,} bytes, then {known.size:,}",
                    allowed="files that are written once: new events in new files",
                    next_step="put the file back as it was, and new events into another file",
                )
            fresh.append(file)
        if not fresh:
            windows = sorted({sealed[file.digest] for file in self._files})
            raise nothing_new(str(self.path), "window " + ", ".join(map(str, windows)))
        return _words(fresh)

    def again(self, words: Words) -> Words:
        """The files of an append that was killed, under the names they have here."""
        here = {file.digest: file for file in self._files}
        begun = [OriginFile(**each) for each in words["files"]]
        missing = [file.name for file in begun if file.digest not in here]
        if missing:
            raise unfinished(str(self.path), f"without {missing[0]}")
        # Words of the first windows of an input stay: the same files make the same log under any names.
        self._named = {file.digest: here[file.digest].name for file in begun}
        return words

    def fetch(self, words: Words, work: Path) -> Path:
        """The file itself, or a folder of links to those that are to be read."""
        if not self.path.is_dir():
            return self.path
        for file in (OriginFile(**each) for each in words["files"]):
            name = self._named.get(file.digest, file.name)
            link = work / "files" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((self.path / name).resolve())
        return work / "files"


def _words(files: list[OriginFile]) -> Words:
    return {"kind": Files.kind, "files": [asdict(file) for file in files]}


def _look_at(source: Path) -> list[OriginFile]:
    """The files of an input: itself, or all of a folder."""
    if not source.exists():
        raise DataError(f"There is no input {source}", next_step="check the path of the raw interactions")
    files = all_files(source) if source.is_dir() else [source]
    found = [
        OriginFile(
            str(path.relative_to(source)) if source.is_dir() else path.name,
            path.stat().st_size,
            sample_file(path, num_blocks=_BLOCKS),
        )
        for path in files
    ]
    if not found:
        raise DataError(f"{source} holds no files", next_step="check the path of the raw interactions")
    return found
