"""Ranks without a launcher of ours: who fails, is killed, stops or comes twice is named to the others in seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from freescale.app.run.train_run import train_run
from freescale.comm.world import free_port, from_first, keep_failures_in
from freescale.comm.world.joining import join_ranks
from freescale.comm.world.ranks import Ranks
from freescale.comm.world.watch import FailureNote, Liveness, SignOfLife, first_cause, liveness
from freescale.comm.world.watch.hub import explain
from freescale.errors import EXIT_PEER, EXIT_UNEXPECTED, DataError
from freescale.recipe import load_config
from freescale.trace import stage
from tests.comm.world.by_hand import ByHand, until
from tests.effort import slow

pytestmark = pytest.mark.timed
HOST = socket.gethostname()


@pytest.fixture
def by_hand(tmp_path):
    ranks = ByHand(tmp_path)
    yield ranks
    ranks.close()


def joined(*, silent_s: float = 20.0, timeout_s: float = 60.0):
    return join_ranks(device="cpu", timeout_s=timeout_s, silent_s=silent_s)


def add_up(ranks: Ranks) -> None:
    assert ranks.sum(torch.ones(1)).item() == ranks.num_ranks


def test_ranks_meet_and_part(by_hand):
    def work(rank: int) -> None:
        with joined() as ranks:
            add_up(ranks)

    assert [rank.end() for rank in by_hand.all(work, 3)] == [(0, "")] * 3


def test_an_error_of_one_rank_is_told_by_all_with_rank_host_stage_and_step(by_hand, tmp_path):
    def work(rank: int) -> None:
        keep_failures_in(tmp_path)
        with joined() as ranks, stage("train", step=3):
            add_up(ranks)
            if rank == 1:
                raise DataError("the file is gone", got="x.parquet")
            add_up(ranks)

    first, second = (rank.end() for rank in by_hand.all(work, 2))
    told = f"rank 1 on {HOST} failed in stage 'train' at step 3: the file is gone"
    assert second[0] == 1
    assert first[0] == EXIT_PEER
    for _, said in (first, second):
        assert told in said
        assert "x.parquet" in said
        assert "Traceback" not in said
    notes = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert {note["rank"] for note in notes} == {0, 1}
    assert all("the file is gone" in note["message"] for note in notes)


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_a_killed_rank_is_named_at_once_even_if_a_process_it_forked_lives_on(by_hand, victim):
    def work(rank: int) -> None:
        with joined() as ranks, stage("train", step=7):
            add_up(ranks)
            if rank == victim:
                time.sleep(1.5)  # it has said once where it is
                if os.fork() == 0:
                    time.sleep(40)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            add_up(ranks)

    started = time.monotonic()
    ended = [rank.end() for rank in by_hand.all(work, 2)]
    assert time.monotonic() - started < 30
    code, said = ended[1 - victim]
    assert code == EXIT_PEER
    assert f"rank {victim} on {HOST}" in said
    assert "ended without a word" in said
    assert "goes on from the last checkpoint" in said
    assert "Traceback" not in said


def test_a_rank_whose_main_thread_does_not_listen_ends_all_the_same(by_hand):
    def work(rank: int) -> None:
        with joined() as ranks:
            add_up(ranks)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    code, said = by_hand.all(work, 2)[0].end(40)
    assert code == EXIT_PEER
    assert "rank 1" in said


def test_a_stopped_rank_is_missed_after_silent_s_and_one_stopped_for_less_is_not(by_hand):
    def work(rank: int) -> None:
        with joined(silent_s=4) as ranks:
            add_up(ranks)
            time.sleep(1.2)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            add_up(ranks)

    ranks = by_hand.all(work, 2)
    pid = ranks[1].process.pid
    stopped = lambda: Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "T"  # noqa: E731
    assert until(stopped)
    time.sleep(2)
    os.kill(pid, signal.SIGCONT)
    for code, said in [rank.end() for rank in ranks]:
        assert code == 0
        assert "no sign of life" not in said

    ranks = by_hand.all(work, 2)
    code, said = ranks[0].end()
    assert code == EXIT_PEER
    assert f"rank 1 on {HOST} has given no sign of life for 4 s" in said


def test_a_late_rank_is_waited_for_and_named_meanwhile(by_hand, monkeypatch):
    monkeypatch.setattr(liveness, "_LATE_S", 1.0)

    def work(rank: int) -> None:
        with joined() as ranks, stage("load and look up", step=5):
            add_up(ranks)
            if rank == 1:
                time.sleep(4)
            add_up(ranks)

    first, second = (rank.end() for rank in by_hand.all(work, 2))
    assert (first[0], second) == (0, (0, ""))
    assert f"waiting for rank 1 on {HOST}, in stage 'load and look up' at step 5" in first[1]


def test_a_rank_that_never_comes_is_named_while_the_others_wait(by_hand):
    def work(rank: int) -> None:
        with joined(timeout_s=5):
            pass

    code, said = by_hand.start(work, 0, 3).end()
    assert code == 1
    assert "waiting for ranks 1, 2: 1 of 3 are here" in said
    assert "gave up after 5 s" in said


def test_rank_0_that_never_comes_is_named_with_its_address(by_hand):
    def work(rank: int) -> None:
        with joined(timeout_s=4):
            pass

    code, said = by_hand.start(work, 1, 2).end()
    assert code == 1
    assert f"waiting for 127.0.0.1:{by_hand.port}: Connection refused" in said


def test_a_port_that_is_taken_is_named(by_hand):
    def work(rank: int) -> None:
        with joined(timeout_s=4):
            pass

    with socket.create_server(("", by_hand.port)):
        code, said = by_hand.start(work, 0, 2).end()
    assert code == 1
    assert f"port {by_hand.port} of this machine is not free" in said
    assert "Traceback" not in said


def test_a_rank_started_twice_is_refused(by_hand):
    def work(rank: int) -> None:
        with joined() as ranks:
            add_up(ranks)

    *ended, first = (each.end() for each in [by_hand.start(work, rank, 2) for rank in (1, 1, 0)])
    assert first == (0, "")
    assert sorted(code for code, _ in ended) == [0, 1]
    said = max(ended)[1]
    assert (
        "rank 1 was started twice: it is process" in said or "goes on already" in said or "has closed" in said
    )


def test_a_process_that_comes_to_a_run_that_goes_on_is_sent_away(by_hand, tmp_path):
    def work(rank: int) -> None:
        with joined() as ranks:
            add_up(ranks)
            (tmp_path / f"here-{rank}").touch()
            until((tmp_path / "go on").exists, 50)
            add_up(ranks)

    ranks = by_hand.all(work, 2)
    assert until(lambda: len(list(tmp_path.glob("here-*"))) == 2, 40)
    code, said = by_hand.start(work, 1, 2).end()
    (tmp_path / "go on").touch()
    assert code == 1
    assert "this run goes on already: rank 1 is process" in said
    assert [rank.end() for rank in ranks] == [(0, "")] * 2


def test_ranks_started_for_another_number_of_ranks_are_told_so(by_hand):
    def work(rank: int) -> None:
        with joined(timeout_s=20):
            pass

    ended = [by_hand.start(work, 0, 3), by_hand.start(work, 1, 3), by_hand.start(work, 2, 4)]
    host = socket.gethostname()
    for code, said in [rank.end() for rank in ended]:
        assert code == 1
        assert f"rank 2 on {host} was started as one of 4 ranks, rank 0 on {host} as one of 3" in said
        assert "start every rank with the same number of ranks (WORLD_SIZE)" in said
        assert "recvValue" not in said, "a store that closed under those who had come"


def test_a_restart_over_the_same_store_meets_the_living(tmp_path):
    """As torchrun restarts the ranks of several nodes: its store still has the addresses of the dead."""

    def work(rank: int) -> None:
        with joined(timeout_s=20) as ranks:
            add_up(ranks)
            if "LAST" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            add_up(ranks)

    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    by_hand = ByHand(tmp_path, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        for rank in by_hand.all(work, 2):
            rank.end()
        again = [by_hand.start(work, rank, 2, LAST="1") for rank in range(2)]
        assert [rank.end() for rank in again] == [(0, "")] * 2
    finally:
        by_hand.close()
        del store


def test_strangers_neither_join_nor_block(by_hand, tmp_path):
    def work(rank: int) -> None:
        with joined() as ranks:
            add_up(ranks)
            (tmp_path / f"here-{rank}").touch()
            until((tmp_path / "go on").exists, 50)
            add_up(ranks)

    ranks = by_hand.all(work, 2)
    assert until(lambda: len(list(tmp_path.glob("here-*"))) == 2, 40)
    ports = listening(ranks[0].process.pid)
    assert ports
    held = []
    for port in ports:
        for words in (b"", b"x" * 4096, b'{"token": "", "rank": 1, "note": {}}\n', b'{"verdict": "end"}\n'):
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                held[-1].sendall(words)
            except OSError:
                continue
    time.sleep(1)  # they are heard, and sent away
    (tmp_path / "go on").touch()
    assert [rank.end() for rank in ranks] == [(0, "")] * 2
    for each in held:
        each.close()


def listening(pid: int) -> list[int]:
    """Ports at which a process takes calls."""
    own = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports


def sign(rank: int, *, waits: bool = True, seconds: float = 0.0) -> SignOfLife:
    return SignOfLife(
        rank=rank,
        host=f"h{rank}",
        pid=1,
        stage="train",
        step=4,
        seconds=seconds,
        waits=waits,
        line="a:1",
        silent_s=9,
    )


def test_only_time_awake_counts_as_silence():
    each = Liveness(2)
    for rank in range(2):
        each.heard(sign(rank), now=100.0)
    each.look(now=100.0)
    for now in range(101, 108):
        each.look(now=float(now))
    assert each.silent(now=107.0) is None
    each.look(now=500.0)  # stopped itself
    assert each.silent(now=500.0) is None
    each.heard(sign(0), now=503.0)
    for now in range(501, 504):
        each.look(now=float(now))
    assert each.silent(now=504.0).rank == 1


def test_who_is_late_is_the_one_that_does_not_wait():
    each = Liveness(3)
    for rank in range(3):
        each.heard(sign(rank, waits=rank != 1, seconds=30), now=10.0)
    assert "rank 1 on h1, in stage 'train' at step 4 for 31 s" in each.late(now=11.0)
    assert each.late(now=12.0) is None  # said once, then now and then
    for rank in range(3):
        each.heard(sign(rank, waits=True, seconds=30), now=20.0)
    assert each.late(now=20.0) is None


def test_ranks_that_all_wait_for_each_other_are_named():
    each = Liveness(2)
    for rank in range(2):
        each.heard(sign(rank, waits=True, seconds=9), now=10.0)
    assert each.late(now=10.5) is None
    for rank in range(2):
        each.heard(sign(rank, waits=True, seconds=11), now=12.0)
    said = each.late(now=12.0)
    assert said.startswith(
        "nothing moves: all ranks wait for each other; rank 0 on h0, in stage 'train' at step 4"
    )
    assert "rank 1 on h1" in said
    assert each.late(now=13.0) is None


def test_ranks_that_stand_still_without_waiting_are_named_more_and_more_seldom():
    each, said = Liveness(2), []
    for now in range(10, 600):
        for rank in range(2):
            each.heard(sign(rank, waits=False, seconds=now), now=float(now))
        if text := each.late(now=float(now)):
            assert text.startswith(
                f"no rank has come further for {now} s, and none waits for another; rank 0 on h0"
            )
            said.append(now)
    assert said == [120, 240, 480]


def test_a_rank_that_is_not_back_from_the_run_before_is_named():
    each = Liveness(2)
    for rank in range(2):
        each.heard(sign(rank), now=0.0)
        each.left(rank)
    assert each.late(now=1.0) is None
    each.heard(sign(0, waits=True, seconds=12), now=20.0)
    assert each.late(now=20.0) == "waiting for ranks that are not back from the run before: 1"
    for rank in range(2):
        each.heard(sign(rank, waits=rank == 0, seconds=0), now=21.0)
    assert each.late(now=21.0) is None


def test_a_known_error_explains_the_connections_it_broke():
    def note(rank: int, kind: str, when: float, met_by: str | None = None) -> FailureNote:
        return FailureNote(
            rank=rank, host="h", stage="s", step=1, message="m", kind=kind, time=when, met_by=met_by
        )

    notes = [note(0, "connection", 1.0), note(1, "unexpected", 2.0), note(2, "known", 3.0)]
    assert first_cause(notes).rank == 2
    assert first_cause(notes[:2]).rank == 1
    assert first_cause([]) is None
    # Who heard of it may say so first; and whoever met it may be gone before it could.
    assert first_cause([note(0, "heard", 1.0), *notes]).rank == 2
    assert (
        explain([note(0, "heard", 1.0, "rank 2 on g")], ["rank 2 ended without a word"], None)
        == "rank 2 on g failed: m"
    )


@pytest.mark.parametrize("error", [KeyError("loss"), ConnectionRefusedError("tracker")], ids=repr)
def test_what_nobody_foresaw_on_the_first_rank_is_known_to_the_others_though_the_hub_ends_with_it(
    by_hand, error
):
    def work(rank: int) -> None:
        def ask() -> None:
            raise error

        with joined() as ranks, stage("judge", step=3):
            from_first(ask, ranks=ranks, what="ask the judge")

    (code, said), (peers_code, told) = (rank.end() for rank in by_hand.all(work, 2))
    assert (code, peers_code) == (EXIT_UNEXPECTED, EXIT_PEER)
    assert "Traceback" in said
    assert f"rank 0 on {HOST} failed in stage 'judge' at step 3: {type(error).__name__}" in told
    assert "without a word" not in told


def test_what_others_hear_is_told_as_that_of_whoever_met_it(by_hand):
    def work(rank: int) -> None:
        def look() -> None:
            raise DataError("the file is empty")

        with joined() as ranks, stage("look", step=3):
            from_first(look, ranks=ranks, what="look")

    (_, said), (code, told) = (rank.end() for rank in by_hand.all(work, 2))
    assert f"rank 0 on {HOST} failed in stage 'look' at step 3: the file is empty" in said
    assert code == 1
    assert f"rank 0 on {HOST} failed: the file is empty" in told
    assert "rank 1" not in told


def test_on_the_way_out_of_a_failure_communicators_are_cut_off_and_never_closed(by_hand, monkeypatch):
    """NCCL's way of closing waits for what the other ranks still owe: the message must be out, and the process end."""
    calls = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: time.sleep(60))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", lambda: calls.append(1))

    def work(rank: int) -> None:
        try:
            with joined() as ranks:
                add_up(ranks)
                raise DataError("the file is gone")
        finally:
            assert calls == [1]
            sys.stderr.flush()
            assert "the file is gone" in Path(f"/proc/self/fd/{2}").read_text()

    assert [rank.end(15)[0] for rank in by_hand.all(work, 2)] == [1, 1]


@pytest.mark.parametrize("other", ["embedding.id_map=zero_collision", "ffn.kind=moe", "run.seed=2"])
def test_a_rank_with_another_recipe_is_named_before_anything_is_built(by_hand, tmp_path, other):
    def work(rank: int) -> None:
        config = load_config(
            None, [f"run.out={tmp_path / 'run'}", "run.device=cpu", *([other] if rank else [])]
        )
        train_run(config, resume="auto", open_terminal=lambda total: None)

    for code, said in [rank.end() for rank in by_hand.all(work, 2)]:
        assert code == 1
        assert f"ranks disagree on the run: rank 1 differs from rank 0 in {other.partition('=')[0]}" in said
        assert "Traceback" not in said


def test_a_rank_that_fails_before_it_joins_is_named_by_those_who_wait_for_it(by_hand):
    def work(rank: int) -> None:
        if rank == 1:
            raise DataError("no such recipe")
        with joined(timeout_s=40):
            pass

    first, second = (rank.end(30) for rank in by_hand.all(work, 2))
    assert second[0] == 1
    assert first[0] == EXIT_PEER
    assert f"rank 1 on {HOST} failed before it joined: no such recipe" in first[1]


def test_signs_of_life_survive_a_frame_that_is_none(monkeypatch):
    """Seen once in a run: `f_back` of a running thread was a bool, and the thread that gives the signs ended."""
    pulse = liveness.Pulse(3, silent_s=5)
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: True})
    assert (pulse.take().rank, pulse.take().line) == (3, "")


def test_an_error_without_a_text_is_told_by_its_place():
    """All that a proof on four GPUs said was `AssertionError:`."""

    def failing(error: Exception) -> FailureNote:
        try:
            raise error
        except Exception as raised:
            return FailureNote.of(raised)

    assert failing(AssertionError()).message.startswith("AssertionError in world/test_watch.py:")
    assert failing(AssertionError("three")).message == "AssertionError: three"
