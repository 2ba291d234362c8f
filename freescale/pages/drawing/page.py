"""The report's page: style, script and the building blocks around the charts.

One file that opens from disk, from a mail or from an object store: no network, no fonts, no libraries.
The content policy in its head makes the browser hold it to that. report.css, report.js and timeline.js lie
in `pages/assets/` and are copied into the pages that need them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from freescale import units

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
"""A live page may ask whoever served it for more, and nobody else."""


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
    *,
    title: str,
    header: str,
    body: Iterable[str],
    footer: str,
    scripts: Sequence[str] = ("report.js",),
    policy: str = POLICY,
    version: str = "",
) -> str:
    """The whole file around fragments that are HTML already; only the title is escaped here.

    Args:
        title: of the window.
        header: top of the page.
        body: its sections.
        footer: last line.
        scripts: files beside this one, in order.
        policy: what the browser lets the page do.
        version: of a live page, the state of the run it shows.
    """
    shown = f' data-version="{escape(version)}"' if version else ""
    code = "".join(f"<script>{_asset(name)}</script>\n" for name in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_asset('report.css')}</style>\n</head>\n<body>\n<main{shown}>\n"
        f"{header}\n{chr(10).join(filter(None, body))}\n<footer>{escape(footer)}</footer>\n</main>\n"
        f"{code}</body>\n</html>\n"
    )


def heading(
    *, brand: str, title: str, state: str, finished: bool, lines: Iterable[str], command: str = ""
) -> str:
    """The top of the page: whose report, which run, how it ended, a line or two about it, and what was typed."""
    mark = f'<span class="state{"" if finished else " open"}">{escape(state)}</span>'
    texts = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    typed = f'<p class="command"><code>{escape(command)}</code></p>' if command else ""
    name = f"<h1>{escape(title)} {mark}</h1>"
    return f'<header><p class="brand">{escape(brand)}</p>{name}{texts}{typed}</header>'


def missing(problems: Sequence[str], *, title: str = "What is missing") -> str:
    """What the page could not show, or shows with doubt."""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return (
        f'<section class="missing" id="{_anchor(title)}"><b>{escape(title)}</b><ul>{items}</ul></section>'
        if items
        else ""
    )


def cards(items: Iterable[Card]) -> str:
    """The headline numbers side by side, two abreast on a phone."""
    boxes = (
        f'<div class="card"><span>{escape(card.name)}</span><strong>{escape(card.value)}</strong>'
        f"<small>{escape(card.context)}</small></div>"
        for card in items
    )
    return f'<section class="cards" id="cards">{"".join(boxes)}</section>'


def section(title: str, content: str, *, kind: str = "") -> str:
    """A titled part of the page, or nothing if it is empty."""
    if not content:
        return ""
    return (
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>'
        f'<div class="{escape(kind)}">{content}</div></section>'
    )


def folded(title: str, content: str) -> str:
    """A titled part of the page that opens on a click, or nothing if it is empty."""
    if not content:
        return ""
    return (
        f'<section id="{_anchor(title)}"><details><summary><h2>{escape(title)}</h2></summary>'
        f'<div class="panel">{content}</div></details></section>'
    )


def table(
    names: Sequence[str], rows: Iterable[Row], *, ends_in_words: bool = False, wraps: bool = False
) -> str:
    """A table that scrolls inside its own box where the screen is narrow.

    Args:
        names: of the columns.
        rows: their cells.
        ends_in_words: whether the last column holds sentences, which may take several lines, and no numbers.
        wraps: whether any cell may take several lines.
    """
    kind = ' class="words"' if ends_in_words else ' class="wraps"' if wraps else ""
    # A corner without a name is no header: readers that speak the page would announce an empty one.
    head = "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in names)
    body = "".join(
        f'<tr class="{escape(row.role)}">{"".join(f"<td>{escape(cell)}</td>" for cell in row.cells)}</tr>'
        for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Table, scrolls sideways">'
        f"<table{kind}><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
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


def _anchor(title: str) -> str:
    """A name for a part of the page that survives an update of its content."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower())) or "part"


def _asset(name: str) -> str:
    return resources.files("freescale.pages").joinpath("assets", name).read_text(encoding="utf-8")
