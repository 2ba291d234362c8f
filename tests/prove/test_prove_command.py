"""`freescale prove` as a user runs it: on CPU ranks, on two machines, and with faults planted, which must be found."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freescale.app.cli import app
from freescale.prove import chosen
from tests.nodes import PORT, nodes, why_no_nodes

pytestmark = pytest.mark.timed  # how fast a rank is, and when a killed one is named

REPOSITORY = Path(__file__).parents[2]
FAULTS = '''
"""A transport that flips one byte, a rank of a third of the speed, a clock 90 s ahead, a library that falls over."""
import ctypes
import os
import time

from freescale.comm.transports import find_transport_kind
from freescale.prove.claim import evidence_of
from freescale.prove.claims import even_ranks
from freescale.registry import register

BAD = os.environ.get("RANK") == "1"


class Pending:
    def __init__(self, real, flip):
        self.real, self.flip = real, flip

    def wait(self):
        rows = self.real.wait()
        if self.flip and rows.numel():
            rows.view(-1)[0] ^= 1 << 8
        return rows


class Flips:
    name = "flips"

    def __init__(self, real):
        self.real, self.count = real, 0
        self.num_ranks, self.rank, self.engine = real.num_ranks, real.rank, real.engine
        self.sm_free, self.reason = real.sm_free, real.reason

    def start(self, tensor, *, send, receive):
        self.count += 1
        return Pending(self.real.start(tensor, send=send, receive=receive), BAD and self.count == 41)

    def exchange_counts(self, counts):
        return exchange_counts(self.real, counts)


@register("transport", "flips")
class FlipsRoute:
    keeps_group = True

    @staticmethod
    def why_not(facts):
        return None

    @staticmethod
    def build(group, facts, timeout_s):
        return Flips(find_transport_kind("collective").build(group, facts, timeout_s))


@register("claim", "falls")
class Falls:
    title, order, limit_s = "A library does not fall over", 5, 60.0
    why_not, cases = staticmethod(lambda facts: None), staticmethod(lambda facts: [""])

    @staticmethod
    def measure(ranks, setting):
        if BAD:
            falls_over()
        ranks.barrier()
        return {}

    @staticmethod
    def judge(reports, setting):
        return [evidence_of(reports, "no address")]


def falls_over():
    ctypes.string_at(0)


if BAD:
    real_time, real_multiply = time.time, even_ranks.multiply
    time.time = lambda: real_time() + 90
    even_ranks.multiply = lambda left, right: real_multiply(left, right, times=30)
'''


def prove(python: str, folder: Path, *words: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [
            python,
            "-m",
            "freescale",
            "prove",
            "--quick",
            "--device",
            "cpu",
            "--out",
            str(folder / "proof"),
            *words,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def found(folder: Path) -> dict[str, dict[str, Any]]:
    """Findings by claim and case."""
    claims = json.loads((folder / "proof" / "proof.json").read_text())["claims"]
    return {f"{claim['name']}:{each['what']}": each for claim in claims for each in claim["findings"]}


def test_two_cpu_ranks_prove_what_they_can(python: str, tmp_path: Path) -> None:
    done = prove(python, tmp_path, "--nproc", "2", "--only", "killed_rank,sm_free")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = found(tmp_path)
    assert seen["killed_rank:SIGKILL"]["status"] == "proven", seen
    assert seen["killed_rank:SIGKILL"]["figures"]["seconds"] < 10
    assert seen["sm_free:all"]["status"] == "not tried"
    assert "1 proven, 0 not proven, 1 not tried" in done.stdout
    assert "A killed rank is named" in (tmp_path / "proof" / "proof.html").read_text()


def test_planted_faults_are_found_and_named(python: str, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    only = "falls,clocks,even_ranks,transports:flips"
    done = prove(python, tmp_path, "--nproc", "2", "--only", only, "--plugin", "faults")
    assert done.returncode == 1, done.stdout + done.stderr
    seen = found(tmp_path)
    flips = seen["transports:flips"]
    assert (flips["status"], flips["figures"]["wrong_numbers"]) == ("not proven", 1)
    assert "to rank 1" in flips["says"]
    assert "clock of rank 1 is 90.0 s ahead of that of rank 0" in seen["clocks:time of day"]["says"]
    slow_rank = seen["even_ranks:matrix products"]
    assert slow_rank["status"] == "not proven"
    assert slow_rank["figures"]["slowest"] == 1
    fallen = seen["falls:no address"]["says"]
    assert re.fullmatch(
        r"rank 1 was ended by signal 11 in .*string_at < faults.py:\d+ falls_over < .*", fallen
    )
    assert "0 proven, 4 not proven" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_claims_on_two_cpu_ranks(python: str, tmp_path: Path) -> None:
    done = prove(python, tmp_path, "--nproc", "2", timeout=390)
    assert (tmp_path / "proof" / "proof.json").exists(), done.stdout + done.stderr
    statuses = {name: each["status"] for name, each in found(tmp_path).items()}
    for name in (
        "one_curve:losses and weights",
        "same_bits:weights and optimizer states",
        "checkpoints:write and read",
    ):
        assert statuses[name] == "proven", done.stdout


@pytest.mark.slow
def test_a_folder_that_two_machines_do_not_share_is_named(python: str, tmp_path: Path) -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)
    out = tmp_path / "proof"
    out.mkdir()
    with nodes(2) as machines:
        machines[1].run(["mount", "-t", "tmpfs", "none", str(out)], check=True)
        processes = []
        for rank, machine in enumerate(machines):
            environment = {
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": str(PORT),
            }
            words = [
                "prove",
                "--quick",
                "--device",
                "cpu",
                "--only",
                "shared_folder,clocks",
                "--out",
                str(out),
            ]
            processes.append(
                machine.popen(
                    [python, "-m", "freescale", *words],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate(timeout=110)[0] for process in processes]
    assert processes[0].returncode == 1, said
    told = json.loads((out / "proof.json").read_text())
    seen = found(tmp_path)
    assert told["facts"]["num_machines"] == 2
    assert seen["shared_folder:files of other ranks"]["status"] == "not proven"
    assert "run.out is not shared: rank 1" in seen["shared_folder:files of other ranks"]["says"]
    assert seen["clocks:time of day"]["status"] == "proven"
    assert not [
        word for word in ("node-a", "node-b", machines[0].address, str(tmp_path)) if word in json.dumps(told)
    ]


def test_a_claim_that_is_not_there_is_refused_by_its_name() -> None:
    with pytest.raises(Exception, match="there is no claim 'one_curv'") as caught:
        chosen(["one_curv"])
    assert "did you mean 'one_curve'" in str(caught.value)


def test_another_device_is_refused() -> None:
    done = CliRunner().invoke(app, ["prove", "--device", "gpu"])
    assert "there is no such device" in str(done.exception)


def test_claims_are_listed_without_starting_anything() -> None:
    done = CliRunner().invoke(app, ["prove", "--list"])
    assert done.exit_code == 0
    assert "one_curve: One curve" in done.stdout


def test_a_wrong_claim_is_told_before_ranks_are_started() -> None:
    done = CliRunner().invoke(app, ["prove", "--nproc", "2", "--device", "cpu", "--only", "clock"])
    assert done.exit_code == 1
    told = str(done.exception) + done.output
    assert "there is no claim 'clock'" in told
    assert "rank" not in told.partition("allowed")[0]
