"""What `freescale publish` and `freescale compact` do: checkpoints of a run become versions of a chain.

Publishing reads checkpoints that are complete, in a process of its own: it stops no training, needs nothing that a run
would have to keep for it, and a run on any number of ranks is published alike.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from freescale.app.run.opened_run import open_run, run_file, write_run_export
from freescale.app.serving.first_recommended import FirstRecommended
from freescale.data import DataDigest
from freescale.errors import CheckpointError
from freescale.exports import ASIDE, Publisher, exported_version, read_version
from freescale.recipe import Config, run_identity
from freescale.trace import PUBLISHED_FILE, note_published, read_published
from freescale.train import Run, kept_facts, load_run, read_meta, saved_in, step_of


@dataclass(frozen=True, kw_only=True)
class Published:
    """One publication.

    Args:
        seq: number of the version.
        step: steps it has behind it.
        num_bytes: that were written.
        seconds: that it took.
        changed: items that are new or have another vector.
        deleted: items that are gone.
        num_items: of the version.
        ages: in seconds, of items that came later than the first version and were recommended for the first time.
        problem: why the run's folder does not tell of it; None: it does.
    """

    seq: int
    step: int
    num_bytes: int
    seconds: float
    changed: int
    deleted: int
    num_items: int
    ages: tuple[int, ...] = ()
    problem: str | None = None


def publish_run(
    run_dir: Path,
    chain: Path,
    *,
    every_checkpoint: bool = True,
    int8: bool | None = None,
    follow: bool = False,
    poll_s: float = 1.0,
    tell: Callable[[Published], None] = lambda published: None,
) -> int:
    """Publish the checkpoints of a run that are newer than the chain, oldest first; how many there were.

    Args:
        run_dir: the run; it may be going on.
        chain: the chain, made with the first version.
        every_checkpoint: False publishes the newest one alone.
        int8: whether vectors are rounded to 8 bits; None: as the chain has them.
        follow: wait for more.
        poll_s: seconds between looks at the run.
        tell: called after every publication.

    Raises:
        CheckpointError: it is not a run folder, or the chain was published from another run.
    """
    run_file(run_dir, "config.yaml")
    publisher = Publisher(chain, int8=int8)
    opened: _Opened | None = None
    count = 0
    looked_at: list[Path] = []
    while True:
        saved = saved_in(run_dir / "checkpoints")
        if saved != looked_at:
            _check_same_run(publisher, run_dir, saved)
            looked_at = saved
        found = [path for path in saved if step_of(path) > _last_step(publisher)]
        for path in found if every_checkpoint else found[-1:]:
            if opened is None:
                opened = _opened(run_dir, chain)
            published = _publish(publisher, run_dir, path, opened)
            if published is not None:
                count += 1
                tell(published)
        if not follow:
            return count
        time.sleep(poll_s)


def compact_chain(chain: Path) -> Any:
    """Make a base of the last version of a chain."""
    if not (chain / "current.json").exists():
        raise CheckpointError(
            "this is not a chain: it has no current.json",
            got=chain,
            next_step="`freescale publish RUN_DIR CHAIN` makes a chain",
        )
    return Publisher(chain).compact()


def _last_step(publisher: Publisher) -> int:
    return -1 if publisher.current is None else int(publisher.current.facts["step"])


def _check_same_run(publisher: Publisher, run_dir: Path, saved: Sequence[Path]) -> None:
    """A chain holds versions of one run; one that does not say of which takes the next for it."""
    known: Mapping[str, Any] = {} if publisher.current is None else publisher.current.facts
    meta = kept_facts(reversed(saved))
    if "run" not in known or not meta or known["run"] == _identity(meta):
        return
    raise CheckpointError(
        f"{publisher.chain} was published from another run",
        got=f"{run_dir}; the chain is of the run that was in {known['run_dir']}, up to step {known['step']}",
        next_step="give that run, wherever its folder is now, or publish this one into a new folder",
    )


def _identity(meta: Mapping[str, Any]) -> str:
    """Which run a checkpoint is of; of one that does not say, by its recipe and its data."""
    if "identity" in meta:
        return str(meta["identity"])
    data = DataDigest.from_state(meta["data"]).fingerprint if "data" in meta else ""
    return run_identity(meta["recipe"], data)


@dataclass(frozen=True)
class _Opened:
    config: Config
    run: Run
    first: FirstRecommended | None


def _opened(run_dir: Path, chain: Path) -> _Opened:
    config, run, _ = open_run(run_dir, device="cpu")
    if run.log is None:
        return _Opened(config, run, None)
    before = read_published(run_dir, chain=str(chain.resolve()))
    return _Opened(config, run, FirstRecommended(run.log.source, before))


def _publish(publisher: Publisher, run_dir: Path, path: Path, opened: _Opened) -> Published | None:
    """Publish one checkpoint; None where the run has removed it meanwhile."""
    started = time.monotonic()
    run = opened.run
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
        version = read_version(write_run_export(work / "export", opened.config, run, meta, run_dir))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    step = int(meta["step"])
    facts: dict[str, Any] = {
        "run": _identity(meta),
        "run_dir": str(run_dir.resolve()),
        "step": step,
        "written": meta.get("written"),
        "published": time.time(),
    }
    if "log" in meta:
        facts |= {"windows": meta["log"]["windows"]}
    done = publisher.publish(version, facts)
    published = Published(
        seq=done.current.seq,
        step=step,
        num_bytes=done.num_bytes,
        seconds=time.monotonic() - started,
        changed=done.changed,
        deleted=done.deleted,
        num_items=done.num_items,
    )
    return _noted(published, publisher, run_dir, facts, opened.first)


def _noted(
    published: Published,
    publisher: Publisher,
    run_dir: Path,
    facts: dict[str, Any],
    first: FirstRecommended | None,
) -> Published:
    """Ask the new version what it recommends, and write a line about it for the report."""
    assert publisher.version is not None
    asked = {}
    if first is not None and facts.get("windows"):
        asked = first.ask(exported_version(publisher.version), windows=facts["windows"])
    told = asdict(published)
    told.pop("ages"), told.pop("problem")
    published = replace(published, ages=tuple(age for _, age in asked.get("fresh", ())))
    try:
        note_published(run_dir, {"chain": str(publisher.chain.resolve()), **told, **facts, **asked})
    except OSError as error:
        return replace(published, problem=f"{run_dir / PUBLISHED_FILE} cannot be written: {error.strerror}")
    return published
