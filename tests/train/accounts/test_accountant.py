"""An account worked out beside the steps is the one worked out between them; its end is told to who waits for it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.comm import exchange_counts
from freescale.comm.transports.kinds.local import SocketTransport
from freescale.errors import TrainingError
from freescale.trace.bubbles import Parts, split_step
from freescale.trace.span_file import SpanWriter, read_spans
from freescale.trace.spans import Arrival, HostClock, Recorder, Span
from freescale.trace.stages import compute, exchange, record_into, stage
from freescale.train.accounts.accountant import Accountant, Due, KeptStepParts
from freescale.train.accounts.accounting import AccountedStep, Accounts
from freescale.train.accounts.beside import Beside, Bookkeeper, Here
from freescale.train.accounts.notes import Ask
from tests.effort import examples
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

NUM_STEPS = 6


def some_spans(rng: random.Random, num_spans: int, num_steps: int) -> list[Span]:
    spans = []
    for number in range(num_spans):
        start = rng.uniform(-1, num_steps)
        kind, lane = rng.choice(["stage", "compute", "wait"]), rng.choice(["main", "other"])
        arrival = Arrival("x", 1, start, number) if kind == "wait" and rng.random() < 0.7 else None
        last = None if arrival is None or rng.random() < 0.3 else start + rng.uniform(-1, 1)
        spans.append(Span("x", kind, lane, 1, start, start + rng.uniform(0, 2.5), arrival, last))
    return spans


def told(rng: random.Random, *, late: float) -> tuple[list[Span], list[tuple[int, float, float]]]:
    """Steps of a second: work, an exchange that another thread begins, a wait for that thread, an exchange."""
    spans, ended, serial = [], [], 0
    for step in range(1, NUM_STEPS + 1):
        begin = float(step)
        worked = begin + 0.2 + late * rng.random()
        serial += 1
        early = Arrival("rows", step, begin + 0.1 * rng.random(), serial)
        spans.append(Span("rows", "wait", "rows", step, early.mark, begin + 0.5, early))
        spans.append(Span("work", "compute", "main", step, begin, worked))
        ready = Arrival("rows", step, begin + 0.5, 0)
        spans.append(
            Span("wait for rows", "wait", "main", step, min(worked, begin + 0.5), max(worked, begin + 0.5))
        )
        spans.append(Span("take rows", "handover", "main", step, worked, max(worked, begin + 0.5), ready))
        serial += 1
        sums = Arrival("sums", step, max(worked, begin + 0.5), serial)
        spans.append(Span("sums", "wait", "main", step, sums.mark, begin + 0.9, sums))
        ended.append((step, begin, begin + 1))
    return spans, ended


def in_turn(books: list[Bookkeeper], on_ask: Callable[[Ask], None] = lambda ask: None) -> list[Any]:
    """Let all ranks ask and answer until each says which steps closed."""
    while True:
        said = [each.said() for each in books]
        if not isinstance(said[0], Ask):
            return said
        on_ask(said[0])
        mine = [ask.mine for ask in said]
        answer = [max(numbers) for numbers in zip(*mine)] if said[0].kind == "largest" else mine
        for each in books:
            each.answer(answer)


def accounts_of(
    kind: Callable[..., Any], folder: Path, seed: int, stalls: int
) -> tuple[list[Any], list[Any]]:
    """Two accounts of two ranks, the second of which is late; closed steps, and what the span files tell."""
    rng = random.Random(seed)
    books, passed = [], []
    for rank in range(2):
        writer = SpanWriter(folder, rank=rank, num_ranks=2, origin=0.0)
        books.append(kind(rank=rank, spans=writer))
        passed.append(told(rng, late=0.6 * rank))
    closed = []
    try:
        for each in books:
            each.begin()
        for first, up_to in ((1, 4), (5, NUM_STEPS)):
            for rank, each in enumerate(books):
                spans, ended = passed[rank]
                now = [span for span in spans if (span.step <= 4) == (first == 1)]
                stood = [(2.2, 2.4)] if stalls and rank == 1 and first == 1 else []
                steps = [one for one in ended if first <= one[0] <= up_to]
                each.start(now, steps, Due(first, up_to, offset=0.25 * rank, stalls=stood))
            found = in_turn(books)
            closed.append(found)
            for each, steps in zip(books, found):
                each.keep([KeptStepParts(one.step, one.lengths.parts(), None) for one in steps])
    finally:
        for each in books:
            each.close()
    return closed, read_spans(folder).ranks


@pytest.mark.parametrize("stalls", [0, 1])
def test_it_comes_to_the_same_numbers_and_files_in_a_process_of_its_own(tmp_path: Path, stalls: int):
    here = accounts_of(partial(Here, alone=False), tmp_path / "here", 3, stalls)
    beside = accounts_of(Beside, tmp_path / "beside", 3, stalls)
    assert [[step.step for step in found] for found in here[0][0]] == [[1, 2, 3, 4]] * 2
    assert here[0] == beside[0]
    assert here[1] == beside[1]
    assert [len(rank.steps) for rank in here[1]] == [NUM_STEPS] * 2
    waited = sum(step.lengths.straggler for account in here[0] for step in account[0])
    assert waited > 0.1  # the first rank for the second


def test_a_process_that_fails_or_ends_is_named(tmp_path: Path):
    books = Beside(rank=0, spans=None)
    books.begin()
    books._tell(("no such word",))
    with pytest.raises(TrainingError, match=r"accounting for the time of steps failed(.|\n)*no such word"):
        books.said()
    books.close()
    books = Beside(rank=0, spans=None)
    os.kill(books._process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"has ended(.|\n)*exit code -9"):
        books.said()
    books.close()


def test_it_lives_on_where_its_rank_is_told_to_stop_and_ends_with_it(tmp_path: Path):
    books = Beside(rank=0, spans=SpanWriter(tmp_path, rank=0, num_ranks=1, origin=0.0))
    books.begin()
    books.start([], [(1, 0.0, 1.0)], Due(1, 1))
    assert [[step.step for step in found] for found in in_turn([books])] == [[1]]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(books._process.pid, number)
    books.keep([KeptStepParts(1, Parts(1.0, 0.5, 0.0, 0.0), None)])
    books.close()
    assert books._process.returncode == 0
    assert list(read_spans(tmp_path).ranks[0].steps) == [1]


def beside_the_steps(
    rank: int, folder: str, every: int, say: Callable[[str], None] = lambda text: None
) -> tuple[list[AccountedStep], list[int], list[int]]:
    """Steps of some milliseconds; which of them were written while the others went on, and when."""
    ranks, accounted, when = these_ranks(), [], []
    recorder = Recorder(HostClock())
    record_into(recorder)
    spans = SpanWriter(Path(folder), rank=rank, num_ranks=2, origin=0.0)
    step = 0

    def write(one: AccountedStep) -> None:
        accounted.append(one)
        when.append(step)

    accounts = Accounts(
        ranks=ranks, recorder=recorder, write=write, every=every, beside=True, spans=spans, say=say
    )
    transport = SocketTransport(ranks.group)
    accounts.begin(1)
    for step in range(1, 51):
        with stage("train", step=step):
            with compute("work"):
                time.sleep(0.004 + 0.004 * rank)
            with exchange("sums"):
                exchange_counts(transport, torch.zeros(2, dtype=torch.int64))
        accounts.end_step()
        accounts.add(step, {"n": step})
    accounts.pause()
    accounts.close()
    record_into(None)
    return accounted, when, sorted(read_spans(Path(folder)).ranks[rank].steps)


@pytest.mark.timed
@pytest.mark.parametrize("every", [16, 3, 1])
def test_steps_go_on_while_their_account_is_worked_out_and_none_is_lost(tmp_path: Path, every: int):
    (accounted, when, kept), (others, others_when, _) = run_on_ranks(
        beside_the_steps, 2, str(tmp_path), every
    )
    assert [one.step for one in accounted] == [one.step for one in others] == list(range(1, 51))
    assert kept == list(range(1, 51))
    assert when == others_when  # at the same steps on every rank, whatever their processes take
    assert all(len(one.ranks) == 2 for one in accounted)
    if every == 16:
        assert when[1] > 17  # the account of step 17 is over some steps later
    late = sum(one.ranks[0].straggler for one in accounted[2:])
    assert late > 0.5 * 0.004 * 48


def without_processes(rank: int, folder: str) -> tuple[list[AccountedStep], list[int], list[str]]:
    said: list[str] = []
    with patch.object(subprocess, "Popen", side_effect=OSError("no more processes")):
        accounted, when, _ = beside_the_steps(rank, folder, 8, said.append)
    return accounted, when, said


@pytest.mark.timed
def test_where_no_process_can_be_started_it_is_said_and_nothing_is_lost(tmp_path: Path):
    (accounted, when, said), (_, others_when, _) = run_on_ranks(without_processes, 2, str(tmp_path))
    assert [one.step for one in accounted] == list(range(1, 51))
    assert when == others_when
    assert len(said) == 1
    assert "no more processes" in said[0]


@examples(17, thorough=200)
@given(seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 6), num_spans=st.integers(0, 40))
def test_steps_closed_one_after_the_other_are_those_split_from_all_spans(seed, num_steps, num_spans):
    spans = some_spans(random.Random(seed), num_spans, num_steps)
    accountant = Accountant(rank=0, alone=True)
    accountant.hear(spans, [(step + 1, float(step), float(step + 1)) for step in range(num_steps)])
    for step in range(num_steps):
        with pytest.raises(StopIteration) as over:
            next(accountant.account(Due(step + 1, step + 1)))
        ((number, lengths),) = over.value.value
        assert (number, lengths.parts()) == (step + 1, split_step(step, step + 1, spans))
        assert set(accountant._spans) == {span for span in spans if span.end > step + 1}
