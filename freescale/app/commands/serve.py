"""Commands about fresh serving: publish, compact, serve."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from freescale import units
from freescale.app.arguments import Plugins, RunDir, load_plugins, say
from freescale.errors import ConfigError

ChainDir = Annotated[Path, typer.Argument(metavar="CHAIN", help="Folder of the chain.")]


def publish(
    run_dir: RunDir,
    chain: ChainDir,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as the run writes checkpoints; Ctrl-C ends it.")
    ] = False,
    newest: Annotated[
        bool, typer.Option("--newest", help="Pass over checkpoints that a newer one follows.")
    ] = False,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Round vectors to 8 bits, row by row: smaller, and not bit for bit."),
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Publish the checkpoints of a run as versions of a chain: a full export once, then what has changed.

    Reads checkpoints that are complete, so the run may be going on, on any number of ranks.
    """
    load_plugins(plugin)
    from freescale.app.serving.publishing import Published, publish_run

    problems: set[str] = set()

    def tell(published: Published) -> None:
        say(
            f"{chain}: version {published.seq}, step {published.step}, {published.num_bytes / 2**20:,.3f} MiB "
            f"in {published.seconds:.2f} s, {published.changed:,} of {published.num_items:,} items changed, "
            f"{published.deleted:,} gone{_ages(published.ages)}"
        )
        if published.problem is not None and published.problem not in problems:  # once
            say(published.problem)
            problems.add(published.problem)

    try:
        count = publish_run(
            run_dir, chain, every_checkpoint=not newest, int8=int8 or None, follow=follow, tell=tell
        )
    except KeyboardInterrupt:
        return
    if not count:
        say(f"{chain}: nothing newer to publish")


def _ages(ages: Sequence[int]) -> str:
    """How old new items were that were recommended for the first time."""
    if not ages:
        return ""
    middle = units.long_duration(statistics.median(ages))
    return f", {len(ages):,} new ones recommended for the first time, {middle} old (median)"


def compact(chain: ChainDir) -> None:
    """Make one full export of a chain's last version, with the same fingerprint, and remove what came before."""
    from freescale.app.serving.publishing import compact_chain

    current = compact_chain(chain)
    say(f"{chain}: version {current.seq} is a base now, fingerprint {current.fingerprint}")


def serve(
    chain: ChainDir,
    host: Annotated[
        str, typer.Option(help="Where to listen; anything but this machine needs FREESCALE_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    refresh: Annotated[float, typer.Option(help="Seconds between looks at the chain.", min=0.01)] = 1.0,
    plugin: Plugins = None,
) -> None:
    """Answer recommend and score by the last version of a chain, and follow it; prints p50 and p99 every minute.

    A reference to try a chain with, not a product: POST /recommend and /score, GET /health.
    """
    load_plugins(plugin)
    from freescale.app.serving.server import ChainServer
    from freescale.exports import ChainModel, is_chain

    if not is_chain(chain):
        is_export = (chain / "manifest.json").exists()
        raise ConfigError(
            "this is an export, not a chain"
            if is_export
            else "this is not a chain: it has no current.json that says so",
            got=chain,
            next_step="`freescale publish RUN_DIR CHAIN` makes a chain",
        )
    model = ChainModel(chain)
    token = os.environ.get("FREESCALE_TOKEN")
    server = ChainServer(model, host=host, port=port, token=token, refresh_s=refresh, tell=say)
    say(f"{server.address}: version {model.seq}; Ctrl-C ends it")
    ended = threading.Event()
    threading.Thread(target=_tell_times, args=(server, ended), daemon=True).start()
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        ended.set()
        say(_times(server.health()))


def _tell_times(server: object, ended: threading.Event) -> None:
    before = -1
    while not ended.wait(60):
        health = server.health()  # type: ignore[attr-defined]
        if health["requests"] != before:
            say(_times(health))
        before = health["requests"]


def _times(health: dict[str, object]) -> str:
    counts = f"version {health['seq']}: {health['requests']} requests, {health['failures']} failed, "
    if health["p50_ms"] is None:
        return f"{counts}{health['refreshes']} refreshes"
    return f"{counts}{health['refreshes']} refreshes, p50 {health['p50_ms']:.2f} ms, p99 {health['p99_ms']:.2f} ms"
