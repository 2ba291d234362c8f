"""What fails on one rank ends all of them alike: the same class and words, or who it was that met the unforeseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from freescale.comm.world.agreement import fail_together, from_first, gather, here
from freescale.comm.world.ranks import Ranks
from freescale.comm.world.watch.failures import FailureNote, first_cause
from freescale.data.sources.parquet import RowRangeError
from freescale.errors import (
    EXIT_ERROR,
    EXIT_PEER,
    EXIT_UNEXPECTED,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    FreeScaleError,
    PeerError,
)
from tests.ranks import run_on_ranks
from tests.small_run import these_ranks

CPU = torch.device("cpu")


def caught(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing failed")


def ask(error: Exception) -> Exception:
    def find() -> None:
        raise error

    return caught(lambda: from_first(find, ranks=these_ranks(), what="ask rank 0"))


def told(error: Exception) -> tuple[str, str, FailureNote]:
    return type(error).__name__, str(error), FailureNote.of(error)


def ask_of_the_unforeseen(rank: int) -> list[Any]:
    return [told(ask(error)) for error in (KeyError("loss"), AssertionError(), ConnectionResetError("gone"))]


def test_an_error_nobody_foresaw_stays_that_of_the_rank_that_met_it():
    for first, second in zip(*run_on_ranks(ask_of_the_unforeseen, 2), strict=True):
        kind, text, note = second
        assert kind == "PeerError"
        assert text.startswith(f"{here(Ranks(rank=0, num_ranks=2, device=CPU))} failed: {first[0]}")
        assert (note.kind, note.exit_code) == ("connection", EXIT_PEER)
        # Also where it looks as if a connection to another had broken: a tracker that a judge asks, a disk far away.
        assert (first[2].kind, first[2].exit_code) == ("unexpected", EXIT_UNEXPECTED)
    # The judge's own bug explains the run, whichever of the two is heard first.
    first, second = (seen[0] for seen in run_on_ranks(ask_of_the_unforeseen, 2))
    assert first[0] == "KeyError"
    assert first_cause([second[2], first[2]]) == first[2]
    assert first[2].exit_code == EXIT_UNEXPECTED


def ask_of_the_known(rank: int) -> list[Any]:
    errors: list[Exception] = [
        kind("this is wrong", got=3, allowed=[1, 2], next_step="take 2")
        for kind in (FreeScaleError, ConfigError, DataError, CheckpointError, DamagedCheckpointError)
    ]
    return [told(ask(error)) for error in errors]


def test_a_known_error_has_its_class_on_every_rank():
    first, *others = run_on_ranks(ask_of_the_known, 3)
    assert [kind for kind, _, _ in first] == [
        "FreeScaleError",
        "ConfigError",
        "DataError",
        "CheckpointError",
        "DamagedCheckpointError",
    ]
    for other in others:
        assert [each[:2] for each in other] == [each[:2] for each in first]
        assert {(note.kind, note.exit_code) for _, _, note in other} == {("heard", EXIT_ERROR)}
        assert {note.met_by for _, _, note in other} == {here(Ranks(rank=0, num_ranks=3, device=CPU))}
        for (*_, met), (*_, heard) in zip(first, other, strict=True):
            assert first_cause([heard, met]) == met, (
                "whoever met it is named, also where another one said so first"
            )


def ask_of_one_of_its_own(rank: int) -> str:
    return type(ask(RowRangeError("no such row"))).__name__


def test_a_class_made_elsewhere_arrives_as_the_one_of_ours_it_is():
    assert run_on_ranks(ask_of_one_of_its_own, 2) == ["RowRangeError", "DataError"]


def fail_at_several(rank: int) -> list[tuple[str, str]]:
    ranks = these_ranks()
    cases: list[list[Exception | None]] = [
        [None, None, None],
        [None, KeyError("b"), ValueError("c")],
        [KeyError("a"), None, DataError("c")],
        [DataError("a"), KeyError("b"), DamagedCheckpointError("c")],
    ]
    fail_together(cases[0][rank], ranks=ranks, what="fail")
    errors = [
        caught(lambda case=case: fail_together(case[rank], ranks=ranks, what="fail")) for case in cases[1:]
    ]
    return [(type(error).__name__, str(error)) for error in errors]


def test_of_several_failures_damage_counts_first_then_what_is_known():
    unforeseen, known, damage = zip(*run_on_ranks(fail_at_several, 3), strict=True)
    assert unforeseen == (
        ("PeerError", f"{here(Ranks(rank=1, num_ranks=3, device=CPU))} failed: KeyError: 'b'"),
        ("KeyError", "'b'"),
        ("ValueError", "c"),
    )
    assert known == (("DataError", "c"),) * 3
    assert damage == (("DamagedCheckpointError", "c"),) * 3


def test_alone_the_error_itself_is_raised():
    error = KeyError("loss")
    with pytest.raises(KeyError) as seen:
        fail_together(error, ranks=these_ranks(), what="fail")
    assert seen.value is error
    assert not isinstance(seen.value, PeerError)
    assert gather(3, group=None, what="count") == [3]
