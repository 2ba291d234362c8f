"""Serve long histories at a fixed cost: compress them once, keep a few kilobytes a user, answer from the latest events.

    python examples/token_cache.py [FOLDER]

Trains a tiny model that compresses histories, exports it, and plays a service: a store of token caches in a SQLite
file that grows as events arrive. Takes some twenty seconds on a CPU.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freescale import TokenCache, load_export

RECENT, SEGMENT = 10, 30
TINY = (
    "synthetic.users=120",
    "synthetic.items=200",
    "synthetic.mean_length=60",
    "data.max_length=130",
    "data.use_time=false",
    "data.global_batch=32",
    "model.dim=16",
    "model.dropout=0",
    f"segments.recent={RECENT}",
    f"segments.length={SEGMENT}",
    "segments.summaries=4",
    "optim.lr=0.01",
    "embedding.lr=0.01",
    "run.steps=10",
    "run.eval_every=10",
)


class CacheStore:
    """Token caches by user, in one SQLite file; any store of bytes will do."""

    def __init__(self, path: Path) -> None:
        self._rows = sqlite3.connect(path)
        self._rows.execute("CREATE TABLE IF NOT EXISTS caches (user INTEGER PRIMARY KEY, cache BLOB)")

    def put(self, user: int, cache: TokenCache) -> None:
        """Keep a user's cache."""
        self._rows.execute("INSERT OR REPLACE INTO caches VALUES (?, ?)", (user, cache.to_bytes()))
        self._rows.commit()

    def get(self, user: int) -> TokenCache | None:
        """The cache of a user, if there is one."""
        found = self._rows.execute("SELECT cache FROM caches WHERE user = ?", (user,)).fetchone()
        return TokenCache.from_bytes(found[0]) if found else None

    def sizes(self) -> dict[int, int]:
        """Bytes stored for each user."""
        return dict(self._rows.execute("SELECT user, length(cache) FROM caches ORDER BY user").fetchall())


def answer(model: Any, store: CacheStore, user: int, events: Sequence[int]) -> list[tuple[int, float]]:
    """Recommendations after `events`; a cache that has fallen a segment behind is brought up to date on the way.

    The whole list stands here for the service's log of events: only those after the cache are read from it, and the
    compressed ones only to leave them out of the answer.
    """
    cache = store.get(user)
    done = cache.num_events if cache is not None else 0
    while len(events) - done >= SEGMENT + RECENT:
        cache = model.compress(events[done : done + SEGMENT], cache=cache)
        store.put(user, cache)
        done += SEGMENT
    return model.recommend(events[done:], cache=cache, exclude=events[:done], k=3)


def main(folder: Path) -> None:
    run, export = folder / "run", folder / "export"
    for command in (["train", *TINY, f"run.out={run}"], ["export", str(run), str(export)]):
        subprocess.run([sys.executable, "-m", "freescale", *command], check=True, stdout=subprocess.DEVNULL)
    model = load_export(export)
    store = CacheStore(folder / "caches.db")
    users = {user: [1 + (7 * user + 11 * n) % 200 for n in range(45 + 20 * user)] for user in range(1, 4)}
    for seen in (45, 80, 105):
        for user, events in users.items():
            best = answer(model, store, user, events[:seen])
            cache = store.get(user)
            kept = 0 if cache is None else cache.num_events
            asked = min(seen, len(events)) - kept
            items = ", ".join(f"{item} ({score:.2f})" for item, score in best)
            print(f"user {user}: {kept} events in the cache, {asked} asked with: items {items}")
    whole = model.recommend(users[3][:100], k=1, filter_seen=False)
    kept = model.compress(users[3][:90])
    same = model.recommend(users[3][90:100], cache=kept, k=1, filter_seen=False)
    print(f"whole history {whole[0][0]} ({whole[0][1]:.4f}), from the cache {same[0][0]} ({same[0][1]:.4f})")
    for user, size in store.sizes().items():
        cache = store.get(user)
        assert cache is not None
        print(
            f"user {user}: {size} bytes stored, {cache.nbytes} for {len(cache.sizes)} segments of keys and values"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
