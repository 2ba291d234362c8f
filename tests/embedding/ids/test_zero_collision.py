"""ZeroCollisionMap against a dictionary, and against the plain rules for every policy."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freescale import ZeroCollisionMap
from freescale.embedding.ids.eviction import LFU, LRU, TTL, ByScore
from freescale.errors import CheckpointError, ConfigError, DataError
from freescale.kernels.id_table import reference
from freescale.kernels.id_table.layout import EMPTY
from tests.effort import examples

LOW, HIGH = -(2**63), 2**63 - 1
IDS = st.one_of(st.integers(-60, 60), st.sampled_from([LOW, HIGH, EMPTY]))
POLICIES = {
    "none": lambda: None,
    "ttl": lambda: TTL(2),
    "lru": LRU,
    "lfu": LFU,
    "score": lambda: ByScore(lambda ids, now: ids % 5),
}


def make_map(policy: str = "none", **options) -> ZeroCollisionMap:
    options = {"num_rows": 64, "max_probe": 6, "num_buckets": 2, "guard": 1, **options}
    return ZeroCollisionMap(eviction=POLICIES[policy](), **options)


class AgainstADictionary(RuleBasedStateMachine):
    """What must hold after any sequence of batches, under any policy."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        admit_after=st.integers(1, 2),
        kind=st.sampled_from(["exact", "count_min"]),
    )
    def start(self, policy: str, admit_after: int, kind: str) -> None:
        self.options = {"admit_after": admit_after, "admission": kind}
        self.policy = policy
        self.map = make_map(policy, **self.options)
        self.rows_of: dict[int, int] = {}
        self.seen: list[set[int]] = []
        self.counts = dict.fromkeys(("asked", "hits", "inserts", "evictions", "shared"), 0)

    @rule(batch=st.lists(IDS, min_size=1, max_size=30))
    def insert(self, batch: list[int]) -> None:
        before = dict(self.rows_of)
        done = self.map.assign(torch.tensor(batch))
        rows = dict(zip(batch, done.rows.tolist()))
        evicted, new = done.evicted_ids.tolist(), done.new_ids.tolist()
        # Equal ids get equal rows, whoever stays keeps its row, and every change is told.
        assert [rows[id_] for id_ in batch] == done.rows.tolist()
        assert len(set(new)) == len(new)
        assert set(new) <= set(batch) - set(before)
        assert set(evicted) <= set(before)
        for id_ in evicted:
            del self.rows_of[id_]
        self.rows_of |= dict(zip(new, done.new_rows.tolist()))
        own = {id_: row for id_, row in rows.items() if id_ in self.rows_of}
        assert own == {id_: self.rows_of[id_] for id_ in own}
        # Nobody in use is evicted: not in this batch, not in the guarded one before it.
        recent = set(batch).union(*self.seen[-1:])
        assert not recent & set(evicted)
        self.seen.append(set(batch))
        shared = [id_ for id_ in batch if id_ not in self.rows_of]
        assert all(rows[id_] == int(self.map.layout.overflow(torch.tensor([id_]))) for id_ in shared)
        for name, count in zip(
            self.counts,
            (len(batch), len(batch) - len(new) - len(shared), len(new), len(evicted), len(shared)),
        ):
            self.counts[name] += count

    @rule(asked=st.lists(IDS, min_size=1, max_size=20))
    def look_up(self, asked: list[int]) -> None:
        found = self.map.lookup(torch.tensor(asked)).tolist()
        assert found == [self.rows_of.get(id_, -1) for id_ in asked]
        shared = self.map.lookup_or_shared(torch.tensor(asked))
        assert bool((shared >= 0).all())
        assert [row for row, own in zip(shared.tolist(), found) if own >= 0] == [
            row for row in found if row >= 0
        ]

    @rule()
    def save_and_load(self) -> None:
        other = make_map(self.policy, **self.options)
        other.load_state_dict({name: values.clone() for name, values in self.map.state_dict().items()})
        other._counts.copy_(self.map._counts)
        self.map = other

    @invariant()
    def nobody_shares_a_row(self) -> None:
        if hasattr(self, "map"):
            ids, rows = self.map.residents()
            assert dict(zip(ids.tolist(), rows.tolist())) == self.rows_of
            assert len(set(self.rows_of.values())) == len(self.rows_of)
            assert EMPTY not in self.rows_of

    @invariant()
    def the_numbers_are_true(self) -> None:
        if hasattr(self, "map"):
            stats = self.map.stats()
            assert stats["occupied"] == len(self.rows_of)
            assert stats["occupancy"] == pytest.approx(len(self.rows_of) / stats["slots"])
            told = {
                **{name: stats[name] for name in ("asked", "hits", "inserts", "evictions")},
                "shared": stats["overflow"],
            }
            assert told == self.counts
            assert sum(stats["probe_histogram"].values()) == len(self.rows_of)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(examples(20, thorough=200), stateful_step_count=15)


@pytest.mark.parametrize("policy", ["ttl", "lru", "lfu", "score"])
@given(st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=30, unique=True), min_size=2, max_size=6))
@examples(13, thorough=200)
def test_every_policy_takes_over_what_the_rules_say(policy: str, batches: list[list[int]]) -> None:
    ids_map = make_map(policy, num_rows=40, num_buckets=1)
    layout = ids_map.layout
    identity = torch.full((layout.held_rows,), EMPTY)
    used = torch.full((layout.held_rows,), -(2**31), dtype=torch.int32)
    score = torch.full((layout.held_rows,), 0 if policy == "lfu" else LOW)
    mode = {"lfu": "add", "score": "set"}.get(policy, "max")
    for now, batch in enumerate(batches, start=1):
        ids = torch.tensor(sorted(batch))
        values = {"ttl": torch.tensor([now + 2]), "lru": torch.tensor([now]), "lfu": torch.tensor([1])}.get(
            policy, ids % 5
        )
        rows, _ = reference.claim(ids, identity, layout)
        reference.touch(rows, used, score, values, now=now, mode=mode)
        wanting = ids[rows < 0]
        rows[rows < 0], gone = reference.evict(
            wanting,
            identity,
            used,
            score,
            layout,
            now=now,
            safe_from=now - 1,
            threshold=now + 1 if policy == "ttl" else HIGH,
            blank=1 if policy == "lfu" else LOW,
        )
        reference.touch(rows, used, score, values, now=now, mode=mode)
        ours = ids_map.assign(ids)
        assert torch.equal(torch.where(rows < 0, layout.overflow(ids), rows), ours.rows)
        assert sorted(ours.evicted_ids.tolist()) == sorted(set(gone.tolist()) - {EMPTY})
        state = ids_map.state_dict()
        for name, truth in (("identity", identity), ("used", used), ("score", score)):
            assert torch.equal(state[name].flatten(), truth), name


def fill(ids_map: ZeroCollisionMap, **when) -> torch.Tensor:
    """Ids until one window is full: all of them in one bucket."""
    ids = torch.arange(ids_map.layout.held_slots * 4)
    ids_map.insert(ids, **when)
    return ids_map.residents()[0]


@pytest.mark.parametrize("held", [None, (1, 2)])
def test_inserting_is_assigning_without_the_telling(held: tuple[int, int] | None) -> None:
    one, other = (ZeroCollisionMap(200, num_buckets=4, max_probe=4, held=held) for _ in range(2))
    for seed in range(4):
        ids = torch.randint(-300, 300, (9, 20), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(one.insert(ids), other.assign(ids).rows)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))
    assert one.stats() == other.stats()
    assert one.stats()["collisions"] > 0


def test_ttl_keeps_what_has_not_expired() -> None:
    ids_map = ZeroCollisionMap(64, num_buckets=1, eviction=TTL(10), guard=0)
    old = fill(ids_map, now=100)
    new = torch.arange(1000, 1010)
    assert ids_map.assign(new, 109).evicted_ids.numel() == 0
    assert len(ids_map.assign(new, 110).evicted_ids) == 10
    assert int((ids_map.lookup(old) >= 0).sum()) == len(old) - 10


def test_each_feature_may_bring_its_own_time_to_live() -> None:
    ids_map = ZeroCollisionMap(64, num_buckets=1, eviction=TTL(10), guard=0)
    ids = torch.arange(ids_map.layout.held_slots)
    short = ids % 2 == 0
    ids_map.insert(ids, 0, ttl=torch.where(short, 3, 50))
    gone = ids_map.assign(torch.arange(1000, 1005), 5).evicted_ids
    assert len(gone) == 5
    assert bool((gone % 2 == 0).all())
    with pytest.raises(DataError, match="one time to live"):
        ids_map.insert(ids, 6, ttl=torch.tensor([1, 2]))


def test_what_expired_first_goes_first() -> None:
    ids_map = ZeroCollisionMap(64, max_probe=200, num_buckets=1, eviction=TTL(1), guard=0)
    ids = torch.arange(ids_map.layout.held_slots)
    for id_ in ids.tolist():
        ids_map.insert(torch.tensor([id_]), id_)
    gone = ids_map.assign(torch.tensor([500, 501, 502]), 1000).evicted_ids
    assert gone.tolist() == [0, 1, 2]


def test_lru_and_lfu_differ_where_they_should() -> None:
    evicted = {}
    for policy in (LRU(), LFU()):
        ids_map = ZeroCollisionMap(64, max_probe=200, num_buckets=1, eviction=policy, guard=0)
        inverse = ids_map.layout.held_slots
        often = torch.tensor([0])
        for _ in range(5):
            ids_map.insert(often)
        for id_ in range(1, inverse):
            ids_map.insert(torch.tensor([id_]))
        gone = ids_map.assign(torch.tensor([900])).evicted_ids.tolist()
        evicted[policy.name] = gone
    assert evicted["lru"] == [0]
    assert 0 not in evicted["lfu"]


def test_repeats_in_one_batch_count_once_for_lfu() -> None:
    ids_map = ZeroCollisionMap(64, num_buckets=1, eviction=LFU())
    row = ids_map.insert(torch.tensor([7] * 9))[0]
    assert ids_map.state_dict()["score"].flatten()[row] == 1


@pytest.mark.parametrize("kind", ["exact", "count_min"])
def test_ids_are_admitted_after_enough_batches(kind: str) -> None:
    ids_map = ZeroCollisionMap(4096, admit_after=3, admission=kind)
    ids = torch.arange(100) * 977
    for batch in range(3):
        assert bool((ids_map.lookup(ids) < 0).all()), batch
        rows = ids_map.insert(ids.repeat(4))
    assert bool((ids_map.lookup(ids) >= 0).all())
    assert torch.equal(rows[:100], ids_map.lookup(ids))
    stats = ids_map.stats()
    assert stats["inserts"] == 100
    assert stats["not_admitted"] == 800
    assert stats["collisions"] == 0


@pytest.mark.parametrize("kind", ["exact", "count_min"])
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=8))
@examples(8, thorough=200)
def test_counts_for_admission_are_never_too_low(kind: str, batches: list[list[int]]) -> None:
    ids_map = ZeroCollisionMap(512, num_buckets=2, max_probe=300, admit_after=2, admission=kind)
    times: dict[int, int] = {}
    for batch in batches:
        ids_map.insert(torch.tensor(batch))
        for id_ in set(batch):
            times[id_] = times.get(id_, 0) + 1
    for id_, count in times.items():
        here = int(ids_map.lookup(torch.tensor([id_]))) >= 0
        assert here or count < 2
        assert kind == "count_min" or here == (count >= 2)


def test_shapes_and_other_integer_types_are_kept() -> None:
    ids_map = make_map(num_rows=200)
    rows = ids_map.insert(torch.tensor([[1, 2, 3], [3, 2, 1]], dtype=torch.int32))
    assert rows.shape == (2, 3)
    assert torch.equal(rows[0], rows[1].flip(0))
    assert ids_map.insert(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("ids", "got"),
    [([1, 2], "a list"), (torch.tensor([1.2, 1.7]), "float32"), (torch.tensor([True]), "bool")],
)
@pytest.mark.parametrize("method", ["insert", "assign", "lookup", "lookup_or_shared"])
def test_ids_must_be_whole_numbers_in_a_tensor(method: str, ids, got: str) -> None:
    ids_map = make_map("lru")
    with pytest.raises(DataError, match=rf"ids must be whole numbers in a tensor\n.*{got}"):
        getattr(ids_map, method)(ids)
    assert ids_map.occupied == 0
    assert getattr(ids_map, method)(torch.tensor([])) is not None


@pytest.mark.parametrize("eviction", ["lru", LRU, 5])
def test_an_eviction_that_is_no_policy_is_refused(eviction) -> None:
    with pytest.raises(ConfigError, match=r"(?s)no policy.*LRU\(\)"):
        ZeroCollisionMap(64, eviction=eviction)


def test_time_cannot_run_backwards() -> None:
    ids_map = make_map("lru")
    ids_map.insert(torch.tensor([1]), 10)
    ids_map.insert(torch.tensor([1]), 10)
    with pytest.raises(DataError, match=r"(?s)time runs backwards.*now=9 after 10"):
        ids_map.insert(torch.tensor([1]), 9)


@pytest.mark.parametrize(
    "change", [{"num_rows": 128}, {"num_buckets": 1}, {"admit_after": 2}, {"policy": "lru"}]
)
def test_a_state_of_another_size_or_policy_is_refused(change) -> None:
    with pytest.raises(CheckpointError, match="another size or policy"):
        make_map(**{"policy": "none", **change}).load_state_dict(make_map().state_dict())


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="guard"):
        ZeroCollisionMap(64, guard=-1)
    with pytest.raises(ConfigError, match="time to live"):
        TTL(0)
    with pytest.raises(ConfigError, match="admission"):
        ZeroCollisionMap(64, admit_after=2, admission="magic")
    with pytest.raises(ConfigError, match="admitted after"):
        ZeroCollisionMap(64, admit_after=0)
    with pytest.raises(DataError, match="score function"):
        ZeroCollisionMap(64, eviction=ByScore(lambda ids, now: ids[:1])).insert(torch.tensor([1, 2]))


def test_readers_beside_a_writer_find_every_id_that_was_there() -> None:
    ids_map = ZeroCollisionMap(200_000)
    there = torch.randperm(60_000)
    truth = ids_map.insert(there)
    wrong: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            wrong.append(int((ids_map.lookup(there) != truth).sum()))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for start in range(100_000, 160_000, 5_000):
        ids_map.insert(torch.arange(start, start + 5_000))
    stop.set()
    for reader in readers:
        reader.join()
    assert len(wrong) >= 3
    assert sum(wrong) == 0


def test_histograms_count_what_is_there() -> None:
    ids_map = ZeroCollisionMap(64, max_probe=64, num_buckets=1, eviction=LRU())
    for id_ in range(9):
        ids_map.insert(torch.tensor([id_]))
    stats = ids_map.stats()
    assert stats["age_histogram"] == {"0": 1, "1": 1, "2-3": 2, "4-7": 4, "8-15": 1}
    ids, rows = ids_map.residents()
    far = [
        next(n for n, row in enumerate(reference.window(ids_map.layout, i)) if row == r)
        for i, r in zip(ids.tolist(), rows.tolist())
    ]
    assert stats["probe_histogram"].get("0", 0) == sum(depth == 0 for depth in far)
    assert sum(stats["probe_histogram"].values()) == 9
