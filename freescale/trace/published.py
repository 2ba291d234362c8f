"""published.jsonl of a run: a line a version that was published of it, written by the publisher, read by the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from freescale.trace.metrics_log import Event, decode

PUBLISHED_FILE = "published.jsonl"
PUBLISHED = "published"


def read_published(run_dir: Path, *, chain: str | None = None) -> list[Event]:
    """The versions published of a run, oldest first; into one chain: that one, or the last that was published into."""
    try:
        lines = (run_dir / PUBLISHED_FILE).read_bytes().splitlines()
    except OSError:
        return []
    events = [event for line in lines if (event := decode(line)) is not None and event["event"] == PUBLISHED]
    wanted = chain if chain is not None else events[-1].get("chain") if events else None
    # Of a version that was published again, after a crash, the later line counts.
    found = {event.get("seq"): event for event in events if event.get("chain") == wanted}
    return list(found.values())


def note_published(run_dir: Path, facts: Mapping[str, object]) -> None:
    """One line more; OSError where the folder of the run cannot be written."""
    path = run_dir / PUBLISHED_FILE
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        # Behind half a line of a publisher that was killed, a whole one begins anew.
        file.write(("" if whole else "\n") + json.dumps({"event": PUBLISHED, **facts}) + "\n")
