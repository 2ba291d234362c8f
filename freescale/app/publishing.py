"""What `freescale publish` and `freescale compact` do: checkpoints of a run become versions of a chain.

Publishing reads checkpoints that are complete, in a process of its own: it stops no training, needs nothing that a run
would have to keep for it, and a run on any number of ranks is published alike.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.app.opened_run import open_run, write_run_export
from freescale.errors import CheckpointError
from freescale.recipe import Config
from freescale.train import ASIDE, Publisher, Run, load_run, read_meta, read_version, saved_in, step_of


@dataclass(frozen=True, kw_only=True)
class Published:
    """One publication.

    Args:
        seq: number of the version.
        step: steps it has behind it.
        num_bytes: that were written.
        seconds: that it took.
    """

    seq: int
    step: int
    num_bytes: int
    seconds: float


def publish_run(
    run_dir: Path,
    chain: Path,
    *,
    every_checkpoint: bool = True,
    follow: bool = False,
    poll_s: float = 1.0,
    tell: Callable[[Published], None] = lambda published: None,
) -> int:
    """Publish the checkpoints of a run that are newer than the chain, oldest first; how many there were.

    Args:
        run_dir: the run; it may be going on.
        chain: the chain, made with the first version.
        every_checkpoint: False publishes the newest one alone.
        follow: wait for more.
        poll_s: seconds between looks at the run.
        tell: called after every publication.
    """
    publisher = Publisher(chain)
    opened: tuple[Config, Run] | None = None
    count = 0
    while True:
        found = [path for path in saved_in(run_dir / "checkpoints") if step_of(path) > _last_step(publisher)]
        for path in found if every_checkpoint else found[-1:]:
            if opened is None:
                config, run, _ = open_run(run_dir, device="cpu")
                opened = config, run
            published = _publish(publisher, run_dir, path, *opened)
            if published is not None:
                count += 1
                tell(published)
        if not follow:
            return count
        time.sleep(poll_s)


def compact_chain(chain: Path) -> Any:
    """Make a base of the last version of a chain."""
    if not (chain / "current.json").exists():
        raise CheckpointError("this is not a chain: it has no current.json", got=chain)
    return Publisher(chain).compact()


def _last_step(publisher: Publisher) -> int:
    return -1 if publisher.current is None else int(publisher.current.facts["step"])


def _publish(publisher: Publisher, run_dir: Path, path: Path, config: Config, run: Run) -> Published | None:
    """Publish one checkpoint; None where the run has removed it meanwhile."""
    started = time.monotonic()
    try:
        meta = read_meta(path)
        if run.log is not None:
            run.log.source.use(run.log.source.num_sealed())
        load_run(run, path)
    except CheckpointError:
        if path.exists():
            raise
        return None
    work = Path(tempfile.mkdtemp(dir=publisher.chain, prefix=ASIDE))
    try:
        version = read_version(write_run_export(work / "export", config, run, meta, run_dir))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    step = int(meta["step"])
    facts: dict[str, Any] = {"step": step, "written": meta.get("written"), "published": time.time()}
    if "log" in meta:
        facts |= {"windows": meta["log"]["windows"]}
    current, num_bytes = publisher.publish(version, facts)
    seconds = time.monotonic() - started
    return Published(seq=current.seq, step=step, num_bytes=num_bytes, seconds=seconds)
