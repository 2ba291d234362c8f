"""What several commands take and print in the same way."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

RunDir = Annotated[Path, typer.Argument(help="Folder of a run (run.out of its recipe).")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="Import a module that registers kinds of your own; may be given several times.",
    ),
]


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """A leading argument without '=' is the recipe; the others are overrides."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments


COMMAND = "FREESCALE_COMMAND"
"""The variable by which ranks know what was typed: they themselves are started with another command."""


def typed_command() -> str:
    """What a person typed to start this process or the one that launched it, to type again."""
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    program, *words = sys.argv
    name = os.path.basename(program)
    is_command = name == "freescale" or os.path.basename(os.path.dirname(program)) == "freescale"
    return shlex.join(["freescale", *words] if is_command else ["python", name, *words])


def number(value: Any) -> str:
    """A metric, or nothing where there is none."""
    return "" if value is None else f"{value:.4f}"


def say(text: str) -> None:
    """Print a line as it is."""
    Console().print(escape(text), highlight=False, soft_wrap=True)


def pairs(words: list[str] | None, *, option: str) -> dict[str, str]:
    """NAME=VALUE, given several times."""
    from freescale.errors import ConfigError

    split = [word.partition("=") for word in words or []]
    for name, sign, value in split:
        if not (name and sign and value):
            raise ConfigError(f"{option} takes NAME=VALUE", got=f"{name}{sign}{value}")
    return {name: value for name, _, value in split}


def load_plugins(modules: list[str] | None) -> None:
    """Import what the person who types has named, from the current folder, too."""
    from freescale.registry import load_plugin

    if modules and "" not in sys.path:
        sys.path.append("")
    for module in modules or []:
        load_plugin(module)
