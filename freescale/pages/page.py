"""The report's page: style, script and the building blocks around the charts.

One file that opens from disk, from a mail or from an object store: no network, no fonts, no libraries.
The content policy in its head makes the browser hold it to that. report.css, report.js and timeline.js lie
beside this file and are copied into the pages that need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from freescale import units

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Card:
    """One headline number: what it is, its value, and what to hold it against."""

    name: str
    value: str
    context: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a table; `role` (best, baseline) decides how it is set off."""

    cells: Sequence[str]
    role: str = ""


def document(
    *, title: str, header: str, body: Iterable[str], footer: str, scripts: Sequence[str] = ("report.js",)
) -> str:
    """The whole file around fragments that are HTML already; only the title is escaped here."""
    code = "".join(f"<script>{_asset(name)}</script>\n" for name in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_asset('report.css')}</style>\n</head>\n<body>\n<main>\n"
        f"{header}\n{chr(10).join(filter(None, body))}\n<footer>{escape(footer)}</footer>\n</main>\n"
        f"{code}</body>\n</html>\n"
    )


def heading(*, brand: str, title: str, state: str, finished: bool, lines: Iterable[str]) -> str:
    """The top of the page: whose report, which run, how it ended, and a line or two about it."""
    mark = f'<span class="state{"" if finished else " open"}">{escape(state)}</span>'
    texts = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<header><p class="brand">{escape(brand)}</p><h1>{escape(title)}{mark}</h1>{texts}</header>'


def missing(problems: Sequence[str]) -> str:
    """What the report could not show, said before anything that it does show."""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<section class="missing"><b>What is missing</b><ul>{items}</ul></section>' if items else ""


def cards(items: Iterable[Card]) -> str:
    """The headline numbers side by side, two abreast on a phone."""
    boxes = (
        f'<div class="card"><span>{escape(card.name)}</span><strong>{escape(card.value)}</strong>'
        f"<small>{escape(card.context)}</small></div>"
        for card in items
    )
    return f'<section class="cards">{"".join(boxes)}</section>'


def section(title: str, content: str, *, kind: str = "") -> str:
    """A titled part of the page, or nothing if it is empty."""
    if not content:
        return ""
    return f'<section><h2>{escape(title)}</h2><div class="{escape(kind)}">{content}</div></section>'


def table(names: Sequence[str], rows: Iterable[Row], *, ends_in_words: bool = False) -> str:
    """A table that scrolls inside its own box where the screen is narrow.

    Args:
        names: of the columns.
        rows: their cells.
        ends_in_words: whether the last column holds sentences, which may take several lines, and no numbers.
    """
    kind = ' class="words"' if ends_in_words else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr class="{escape(row.role)}">{"".join(f"<td>{escape(cell)}</td>" for cell in row.cells)}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(sections: Mapping[str, Mapping[str, object]]) -> str:
    """The start tables of a run, one panel per section."""
    panels = []
    for name, values in sections.items():
        rows = "".join(
            f"<dt>{escape(key)}</dt><dd>{escape(units.fact(value))}</dd>" for key, value in values.items()
        )
        panels.append(f'<div class="panel"><h3>{escape(name)}</h3><dl>{rows}</dl></div>')
    return "".join(panels)


def _asset(name: str) -> str:
    return resources.files("freescale.pages").joinpath(name).read_text(encoding="utf-8")
