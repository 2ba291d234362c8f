"""What leaves a cluster in a report: names of machines, users and folders, and addresses, do not."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b")
_PATH = re.compile(r"(?<![\w/.:~-])~?(?:/[\w.@+=~-]+){2,}/?")
_GPU_ID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


def private_words() -> list[str]:
    """What names this machine, its user and its folders; each rank knows its own."""
    words = {platform.node(), socket.gethostname(), platform.node().partition(".")[0], _user()}
    words |= {str(Path.home()), os.getcwd(), tempfile.gettempdir()} - {"/"}
    words |= {
        os.environ.get(name, "") for name in ("USER", "LOGNAME", "HOSTNAME", "SLURMD_NODENAME", "MASTER_ADDR")
    }
    return sorted(word for word in words if len(word) > 1 and word != "localhost")


def scrub(value: Any, words: Iterable[str]) -> Any:
    """The same value without private words, addresses, paths and ids of GPUs; keys and numbers stay."""
    known = sorted({word for word in words if word}, key=len, reverse=True)
    names = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in known)) if known else None

    def clean(text: str) -> str:
        text = _GPU_ID.sub("[gpu]", text)
        text = _PATH.sub("[path]", text)
        text = names.sub("[private]", text) if names else text
        return _ADDRESS.sub("[address]", text)

    def walk(each: Any) -> Any:
        if isinstance(each, str):
            return clean(each)
        if isinstance(each, dict):
            return {clean(key) if isinstance(key, str) else key: walk(inner) for key, inner in each.items()}
        return [walk(inner) for inner in each] if isinstance(each, list | tuple) else each

    return walk(value)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as containers have it
        return ""
