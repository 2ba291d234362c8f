"""Writes docs/keys.md, the table of every recipe key, from `freescale.recipe.reading.load`. A test keeps it current.

python docs/make_keys.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

from freescale.recipe import Config, describe_recipe

OUT = Path(__file__).parent / "keys.md"
HEAD = """# Every recipe key

`freescale keys` prints the same list. This page is written by `python docs/make_keys.py`; do not edit it by hand.
[Recipes](recipes.md) explains how recipes work. A meaning that begins with `with SECTION.KEY=KIND` is that of an option
of this kind: the key is unknown with any other.
"""


def page() -> str:
    """The whole page as Markdown: one section of the recipe, one table."""
    parts = [HEAD]
    for section, rows in itertools.groupby(describe_recipe(), key=lambda row: row[0].split(".")[0]):
        about = type(getattr(Config(), section)).__doc__
        parts.append(f"## {section}\n\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{name}` | {_cell(kind)} | {_code(_yaml(default))} | {_cell(text)} |"
            for name, kind, default, text in rows
        ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    """In the type of code; a key without a default has none."""
    return f"`{text}`" if text else "none: give one"


def _yaml(default: str) -> str:
    """A default as it would stand in a recipe: Python's False and (3.5,) are YAML's false and [3.5]."""
    if default in ("True", "False"):
        return default.lower()
    return f"[{default[1:-1].rstrip(',')}]" if default.startswith("(") else default


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
