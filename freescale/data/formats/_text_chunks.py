"""Text files, compressed or not, in pieces of whole lines that know where they stand in the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from freescale.data.excerpt import excerpt
from freescale.data.formats._other_files import check_readable
from freescale.errors import DataError

CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_MAX_LINE_BYTES = 64 << 20


class TextChunk(NamedTuple):
    """Whole lines of a text file; `consumed` bytes of the file were read so far."""

    path: Path
    data: bytes
    first_line: int
    consumed: int

    def record_lines(self, *, quoted: bool) -> list[int]:
        """Numbers in the file of the lines in which the records of this chunk start; blank lines hold none."""
        starts, inside_quotes = [], False
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if line.rstrip(b"\r") and not inside_quotes:
                starts.append(number)
            inside_quotes ^= quoted and line.count(b'"') % 2 == 1
        return starts

    def without_blank_start(self) -> TextChunk:
        """The same from its first line that is not blank."""
        blank = len(self.data) - len(self.data.lstrip(b" \t\r\n"))
        start = self.data.rfind(b"\n", 0, blank) + 1
        return self._replace(
            data=self.data[start:], first_line=self.first_line + self.data.count(b"\n", 0, start)
        )

    def split_first(self) -> tuple[str, TextChunk]:
        """The first line, and the chunk without it."""
        first, _, rest = self.data.partition(b"\n")
        return first.decode("utf-8", "replace").rstrip("\r"), self._replace(
            data=rest, first_line=self.first_line + 1
        )

    def first_lines(self, limit: int = 50) -> list[str]:
        """Some lines that are not blank, to look at."""
        some = self.data[: 1 << 16].split(b"\n")[: 2 * limit]
        return [line.decode("utf-8", "replace").rstrip("\r") for line in some if line.strip()][:limit]

    def place(self, line: int) -> tuple[str, str]:
        """That line for an error message: where it is, and its text."""
        text = self.data.split(b"\n")[line - self.first_line].rstrip(b"\r")
        return f"{self.path}, line {line}", repr(excerpt(text))


def text_chunks(path: Path, size: int, *, quoted: bool) -> Iterator[TextChunk]:
    """The file in pieces of about `size` bytes, cut where a line ends (and no quoted field is open)."""
    first_line, rest = 1, b""
    codec = CODECS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            stream = pa.CompressedInputStream(raw, codec) if codec else raw
            while block := stream.read(max(size, len(rest))):
                data = rest + block
                if first_line == 1 and not rest:
                    check_readable(path, data)
                    data = data.removeprefix(b"\xef\xbb\xbf")
                _check_text(path, data)
                cut = _last_line_end(data, quoted=quoted)
                if cut:
                    yield TextChunk(path, data[:cut], first_line, raw.tell())
                    first_line += data.count(b"\n", 0, cut)
                rest = data[cut:]
            if rest.strip():
                yield TextChunk(path, rest + b"\n", first_line, raw.tell())
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read", got=str(error), next_step="check the file") from error


def suffix_of(path: Path) -> str:
    """The extension in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in CODECS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _check_text(path: Path, data: bytes) -> None:
    if b"\0" in data:
        raise DataError(
            f"{path} is not text: it has zero bytes",
            got=repr(data[:16]),
            allowed="text in UTF-8 or ASCII, or Parquet",
            next_step="unpack or convert the file first, or ask for format parquet",
        )
    if len(data) > _MAX_LINE_BYTES:
        raise DataError(
            f"{path} has a line of more than {_MAX_LINE_BYTES >> 20} MiB",
            got=repr(excerpt(data)),
            next_step="check that lines end in a newline and that quotes are closed",
        )


def _last_line_end(data: bytes, *, quoted: bool) -> int:
    cut = data.rfind(b"\n") + 1
    while quoted and cut and data.count(b'"', 0, cut) % 2:
        cut = data.rfind(b"\n", 0, cut - 1) + 1
    return cut
