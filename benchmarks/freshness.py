"""New items in a stream: learnt rows with a time to live against plain hashing into a table of the same size.

    python benchmarks/freshness.py [--ratings ml-1m-ratings.dat] [--seeds 3]

A model is trained day after day and asked, at the end of each day, for the next item of users it was not trained on
(synthetic), or of the next day (MovieLens by time). HR@10 by full ranking over the items alive, for items that are new
and for all. All sides have the same data, model, initial dense weights, number of rows and number of steps:

    zero collision   ZeroCollisionMap with TTL: new items start from fresh rows, retired ones give theirs back
    hash             one 64-bit hash: new items share and inherit rows
    one row an id    a row for every id there ever was: what no table of bounded size can beat by much

The synthetic stream: 1,200 items alive, a fifth of them replaced every day by items with new random 62-bit ids;
sessions of 12 events stay in a genre and follow planted successors. The tables have 1,600 rows.
MovieLens: `user::item::rating::time` lines in time order, cut into 12 parts of equal length; questions are events of
the next part. An item is new in the part it was first rated in and the two after it, but not in the first part of all.
The tables have 1.33 rows for each movie of the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.embedding import Adam, HashMap, IdMap
from freescale.embedding.ids.eviction import TTL
from freescale.embedding.ids.sharded_id_map import ShardedIdMap
from freescale.embedding.sharding.plan import TableSpec
from freescale.embedding.sharding.sharded import ShardedEmbedding
from freescale.embedding.tables.table import as_compute
from freescale.kernels import SequenceLayout
from freescale.kernels.id_table.layout import make_layout
from freescale.model.encoders.hstu import HSTU
from freescale.model.heads import RetrievalHead
from freescale.model.recommender import Recommender
from freescale.pipeline import TABLE, look_up

DIM, BATCH, NEGATIVES, CONTEXT, LEARNING_RATE = 32, 64, 64, 40, 3e-3
CPU = torch.device("cpu")
# MovieLens: parts an item stays new, and questions a part about items that are not.
NEW_FOR, OTHERS = 3, 300
SIDES = ("zero collision", "hash", "one row an id")


@dataclass(frozen=True)
class Day:
    """What is learnt on a day, and what is asked at its end.

    Args:
        sequences: item ids in order; every event but the first is a target.
        questions: (history, next item).
        alive: candidates.
        new: items that came up today.
    """

    sequences: list[np.ndarray]
    questions: list[tuple[np.ndarray, int]]
    alive: np.ndarray
    new: set[int]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratings", type=Path, help="MovieLens ratings with time stamps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--only-ratings", action="store_true", help="leave the synthetic stream out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    if not options.only_ratings:
        make = partial(synthetic, num_days=options.days)
        results["synthetic"] = compare(make, 1600, options.seeds, ttl_days=1)
    if options.ratings:
        movies = movielens(options.ratings)
        rows = round(1.33 * len(np.unique(np.concatenate([day.alive for day in movies]))))
        results["movielens by time"] = compare(lambda seed: movies, rows, options.seeds, ttl_days=6)
    print(json.dumps(results))


def compare(make_days, rows: int, seeds: int, *, ttl_days: int):  # type: ignore[no-untyped-def]
    """Mean HR@10 of every side over the seeds, printed and returned."""
    scores: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(seeds):
        days = make_days(seed)
        for side in SIDES:
            scores[side].append(run(side, days, rows, seed, ttl_days))
            print(
                f"seed {seed} {side:>15}", {k: round(v, 4) for k, v in scores[side][-1].items()}, flush=True
            )
    means = {
        side: {name: float(np.mean([one[name] for one in values])) for name in values[0]}
        for side, values in scores.items()
    }
    print(
        f"{'mean, ' + str(rows) + ' rows':>20} {'HR@10 new':>10} {'HR@10 all':>10} {'asked new':>10} {'asked':>8}"
    )
    for side, mean in means.items():
        print(
            f"{side:>20} {mean['new']:>10.4f} {mean['all']:>10.4f} {mean['asked_new']:>10.0f} {mean['asked']:>8.0f}"
        )
    return {"means": means, "seeds": scores}


def run(side: str, days: list[Day], rows: int, seed: int, ttl_days: int) -> dict[str, float]:
    """Train one side through all days; HR@10 over all questions from the second day on."""
    torch.manual_seed(seed)
    model = Recommender(
        encoder=HSTU(dim=DIM, layers=1, max_length=CONTEXT, time_bias=False), head=RetrievalHead()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps_a_day = [-(-len(day.sequences) // BATCH) for day in days]
    embedding, id_map = make_table(side, days, rows, ttl=ttl_days * max(steps_a_day))
    step, hits = 0, []
    for number, day in enumerate(days):
        for batch in batches(day, seed * 1000 + number):
            lookup, indexed = look_up(batch, embedding, id_map, CPU, step=step)
            (model(lookup.rows, indexed) / batch.num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            embedding.update(lookup, lr=LEARNING_RATE, step=step + 1)
            step += 1
        if number > 0:
            hits += answer(day, model, embedding, id_map)
    new = [hit for hit, is_new in hits if is_new]
    everybody = [hit for hit, _ in hits]
    return {
        "new": float(np.mean(new)) if new else 0.0,
        "all": float(np.mean(everybody)),
        "asked_new": len(new),
        "asked": len(everybody),
    }


def make_table(side: str, days: list[Day], rows: int, *, ttl: int) -> tuple[ShardedEmbedding, IdMap]:
    """The item table of one side. "One row an id" gets as many rows as there will ever be ids."""
    if side == "hash":
        return ShardedEmbedding([TableSpec(name=TABLE, num_rows=rows, dim=DIM, optimizer=Adam())]), HashMap(
            rows
        )
    ever = len(np.unique(np.concatenate([day.alive for day in days])))
    layout = make_layout(rows if side == "zero collision" else 2 * ever, num_buckets=1)
    spec = TableSpec(
        name=TABLE, num_rows=layout.num_rows, row_group=layout.bucket_rows, dim=DIM, optimizer=Adam()
    )
    embedding = ShardedEmbedding([spec])
    return embedding, ShardedIdMap(embedding, TABLE, eviction=TTL(ttl) if side == "zero collision" else None)


def batches(day: Day, seed: int) -> Iterator[SequenceBatch]:
    """The sequences of a day in random order, with negatives from the items alive."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(day.sequences))
    for start in range(0, len(order), BATCH):
        some = [torch.from_numpy(day.sequences[n][-CONTEXT - 1 :]) for n in order[start : start + BATCH]]
        batch = SequenceBatch.from_sequences([{"item": one[:-1], "target": one[1:]} for one in some])
        yield batch.with_samples(negatives=torch.from_numpy(rng.choice(day.alive, (len(some), NEGATIVES))))


@torch.no_grad()
def answer(
    day: Day, model: Recommender, embedding: ShardedEmbedding, id_map: IdMap
) -> list[tuple[bool, bool]]:
    """(target among the first 10, target is new) of every question; items of the history are no candidates."""
    table, head = embedding.tables[TABLE], model.head
    assert isinstance(head, RetrievalHead)
    model.eval()
    candidates = head.candidates(as_compute(table.gather(id_map.rows(torch.from_numpy(day.alive)))))
    place = {int(item): n for n, item in enumerate(day.alive)}
    hits = []
    for start in range(0, len(day.questions), 256):
        part = day.questions[start : start + 256]
        some = [torch.from_numpy(history[-CONTEXT:]) for history, _ in part]
        batch = SequenceBatch.from_sequences([{"item": one, "target": one} for one in some])
        lookup, indexed = look_up(batch, embedding, id_map, CPU)
        states = model.states(lookup.rows, indexed, SequenceLayout(indexed.offsets))[batch.offsets[1:] - 1]
        scores: Tensor = head.queries(states) @ candidates.T
        for row, (history, target) in zip(scores, part):
            goal = float(row[place[target]])
            seen = [place[int(item)] for item in set(history.tolist()) - {target} if int(item) in place]
            row[seen] = float("-inf")
            # Items that share the target's row score the same: half of them are counted as better.
            ahead = int((row > goal).sum()) + (int((row == goal).sum()) - 1) / 2
            hits.append((ahead < 10, target in day.new))
    model.train()
    return hits


def synthetic(
    seed: int, num_days: int, *, alive: int = 1200, genres: int = 40, sessions: int = 2400
) -> list[Day]:
    """A stream in which a fifth of the items is replaced every day."""
    rng = np.random.default_rng([seed, 11])
    ids = rng.integers(0, 1 << 62, alive)
    genre = rng.permutation(np.arange(alive) % genres)
    days = []
    for number in range(num_days):
        new = rng.choice(alive, alive // 5, replace=False) if number else np.arange(alive)
        ids[new] = rng.integers(0, 1 << 62, len(new))
        walks = ids[walk(rng, genre, sessions + sessions // 4)]
        questions = [(one[:-1], int(one[-1])) for one in walks[sessions:]]
        days.append(Day(list(walks[:sessions]), questions, np.sort(ids), set(ids[new].tolist())))
    return days


def walk(rng: np.random.Generator, genre: np.ndarray, count: int, length: int = 12) -> np.ndarray:
    """Sessions in one genre each: half of the steps go to the item's successor, the others anywhere in the genre."""
    members = [np.flatnonzero(genre == g) for g in range(int(genre.max()) + 1)]
    after = np.empty(len(genre), np.int64)
    for one in members:
        after[one] = np.roll(one, 1)
    sessions = np.empty((count, length), np.int64)
    for n in range(count):
        mine = members[rng.integers(len(members))]
        current = rng.choice(mine)
        for step in range(length):
            sessions[n, step] = current
            current = after[current] if rng.random() < 0.5 else rng.choice(mine)
    return sessions


def movielens(path: Path, parts: int = 12) -> list[Day]:
    """Ratings in time order, cut into parts; questions of a part are events of the next one."""
    table = np.loadtxt(path, delimiter=":", usecols=(0, 2, 6), dtype=np.int64)
    table = table[np.lexsort((np.arange(len(table)), table[:, 2]))]
    # Movie numbers are small; mixed, they are like the ids of a real stream.
    item = table[:, 1] * 0x5DEECE66D + 11
    edges = np.linspace(0, len(table), parts + 1).astype(int)
    history: dict[int, list[int]] = {}
    known: set[int] = set()
    fresh: list[set[int]] = []
    days = []
    for start, end, last in zip(edges[:-2], edges[1:-1], edges[2:]):
        for user, one in zip(table[start:end, 0].tolist(), item[start:end].tolist()):
            history.setdefault(user, []).append(one)
        fresh.append(set(item[start:end].tolist()) - known)
        known |= fresh[-1]
        active = sorted(set(table[start:end, 0].tolist()))
        sequences = [np.array(history[user]) for user in active if len(history[user]) > 1]
        # Long histories are learnt from in pieces, so that every new event is seen.
        pieces = [s[max(0, cut - CONTEXT - 1) : cut] for s in sequences for cut in range(len(s), 1, -CONTEXT)]
        new = set().union(*fresh[1:][-NEW_FOR:])
        questions = ask(table[end:last, 0], item[end:last], history, known, new)
        days.append(Day(pieces[:4000], questions, np.array(sorted(known)), new))
    return days


def ask(
    users: np.ndarray, items: np.ndarray, history: dict[int, list[int]], known: set[int], new: set[int]
) -> list[tuple[np.ndarray, int]]:
    """Events of the next part as questions: all whose item is new, and some of the others, evenly spaced."""
    so_far = {user: list(history.get(user, [])) for user in set(users.tolist())}
    events = []
    for user, one in zip(users.tolist(), items.tolist()):
        if so_far[user] and one in known:
            events.append((np.array(so_far[user][-CONTEXT:]), one))
        so_far[user].append(one)
    rest = [event for event in events if event[1] not in new]
    return [event for event in events if event[1] in new] + rest[:: max(1, len(rest) // OTHERS)]


if __name__ == "__main__":
    main()
