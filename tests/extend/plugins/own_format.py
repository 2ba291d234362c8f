"""A raw format from outside the package: `user>item item item`, one user a line, below a line that says so."""

from __future__ import annotations

from freescale import register


@register("format", "arrows")
class Arrows:
    suffixes = (".arrows",)
    in_folders = True

    def recognises(self, sample):
        return "the first line says so" if sample.head.startswith(b"#arrows") else None

    def chunks(self, path, reading):
        with path.open("rb") as file:
            file.readline()
            while lines := file.readlines(reading.chunk_bytes):
                users, items = [], []
                for line in lines:
                    user, _, history = line.decode().partition(">")
                    items += history.split()
                    users += [user] * (len(items) - len(users))
                yield {"user": users, "item": items}, file.tell()
