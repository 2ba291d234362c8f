"""A proof as people and programs read it: counts, exit code, page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from freescale.prove import Facts, Finding, Proof, Table, Wanted, prove
from freescale.prove.page import render
from freescale.prove.proof import Tried

FACTS = Facts(device="cuda", num_ranks=16, num_machines=2, quick=False)
GOOD = Finding("losses", "proven", "they differ by 1e-16", {"apart": 1e-16})
BAD = Finding("collective", "not proven", "3 numbers < 4 & wrong", {"wrong": 3})
NONE = Finding("copy_engine", "not tried", "several machines")
TABLE = Finding("local", "proven", "fast", {}, Table(("bytes", "us"), [["4 KiB", "20"]]))


def proof(*findings: Finding) -> Proof:
    return Proof(FACTS, [Tried("one", "One claim", findings, 3.0)], date="2026-11-17", seconds=3.0)


def test_a_claim_is_as_good_as_its_worst_finding():
    assert proof(GOOD, NONE).claims[0].status == "proven"
    assert proof(GOOD, BAD, NONE).claims[0].status == "not proven"
    assert proof(NONE).claims[0].status == "not tried"


def test_only_what_was_tried_and_failed_is_a_failure():
    assert proof(GOOD, NONE).exit_code == 0
    assert proof(NONE).exit_code == 0
    assert proof(GOOD, BAD).exit_code == 1


def test_the_json_says_all_of_it():
    told = json.loads(proof(GOOD, BAD, NONE).to_json())
    assert (told["proven"], told["not_proven"], told["not_tried"]) == (1, 1, 1)
    assert told["facts"] == {"device": "cuda", "num_ranks": 16, "num_machines": 2, "quick": False}
    assert told["claims"][0]["findings"][1] == {
        "what": "collective",
        "status": "not proven",
        "says": "3 numbers < 4 & wrong",
        "figures": {"wrong": 3},
    }


def test_the_page_shows_what_failed_first_and_the_tables_below():
    page = render(proof(GOOD, BAD, TABLE))
    assert "16 GPU ranks on 2 machines" in page
    assert page.index("3 numbers &lt; 4 &amp; wrong") < page.index("they differ by 1e-16")
    assert "<dt>local</dt><dd>proven: fast</dd>" in page
    assert "4 KiB" in page
    assert "1 not proven" in page
    assert "all that was tried holds" in render(proof(GOOD))


def test_lines_for_a_terminal():
    made = proof(GOOD, BAD, NONE)
    assert list(made.claims[0].lines()) == [
        "One claim: not proven (3 s)",
        "  + losses: they differ by 1e-16",
        "  ! collective: 3 numbers < 4 & wrong",
        "  - copy_engine: several machines",
    ]
    assert made.summary == "1 proven, 1 not proven, 1 not tried; 16 cuda ranks on 2 machines, 3 s"


def test_a_proof_that_was_ended_early_says_what_had_no_turn():
    ended = replace(proof(GOOD), to_come=["killed_rank", "checkpoints"])
    assert ended.exit_code == 1
    assert json.loads(ended.to_json())["to_come"] == ["killed_rank", "checkpoints"]
    page = render(ended)
    assert "not finished: 2 to come" in page
    assert "killed_rank, checkpoints" in page


def test_who_ends_it_early_keeps_what_was_found_by_then(tmp_path):
    def enough(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prove(Wanted(tmp_path, device="cpu", only=("sm_free", "contention")), say=enough)
    left = json.loads((tmp_path / "proof.json").read_text())
    assert [each["name"] for each in left["claims"]] == ["sm_free"]
    assert left["to_come"] == ["contention"]
