"""What evidence proves: judges of claims, given what ranks would have seen."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.comm.world import Ranks
from freescale.prove import Facts, Report, Setting, chosen, runs, worlds
from freescale.prove.claims import prediction
from freescale.prove.claims.balance import LessBubble
from freescale.prove.claims.checkpoints import WrittenAndRead
from freescale.prove.claims.clocks import Clocks
from freescale.prove.claims.contention import Contention
from freescale.prove.claims.even_ranks import EvenRanks
from freescale.prove.claims.killed_rank import KilledRank
from freescale.prove.claims.machine import Machine
from freescale.prove.claims.one_curve import OneCurve
from freescale.prove.claims.prediction import Prediction
from freescale.prove.claims.same_bits import SameBits
from freescale.prove.claims.shared_folder import SharedFolder
from freescale.prove.claims.sm_free import SmFree
from freescale.prove.claims.transports import Transports
from freescale.recipe import load_config

SETTING = Setting(out=Path("out"), quick=True, case="local", device="cpu")


def seen(*evidence: dict[str, Any]) -> list[Report]:
    return [Report(rank, each, exit_code=0) for rank, each in enumerate(evidence)]


def judged(claim: Any, *evidence: dict[str, Any]) -> tuple[str, str]:
    (finding,) = claim.judge(seen(*evidence), SETTING)
    return finding.status, finding.says


def test_every_claim_has_what_the_protocol_asks_for():
    claims = chosen(())
    assert [claim.order for _, claim in claims] == sorted(claim.order for _, claim in claims)
    for name, claim in claims:
        assert claim.title, name
        assert claim.limit_s > 0
        for part in ("why_not", "cases", "measure", "judge"):
            assert callable(getattr(claim, part)), (name, part)


def test_one_rank_alone_is_told_what_is_not_tried():
    alone = Facts(device="cpu", num_ranks=1, num_machines=1, quick=True)
    untried = {name for name, claim in chosen(()) if claim.why_not(alone)}
    assert {"one_curve", "same_bits", "transports", "clocks", "killed_rank", "balance"} <= untried
    assert not {"machine", "checkpoints"} & untried


@pytest.mark.parametrize("claim", [claim for _, claim in chosen(())], ids=lambda claim: claim.__name__)
def test_a_rank_that_hangs_or_dies_proves_nothing(claim):
    for bad in (
        Report(1, None, timed_out=True, seconds=60.0, exit_code=-9),
        Report(1, None, error="ValueError: no such thing", exit_code=70),
        Report(1, None, exit_code=-signal.SIGSEGV),
    ):
        for finding in claim.judge(
            [Report(0, None, error="another rank failed", exit_code=76), bad], SETTING
        ):
            assert finding.status == "not proven"
            assert "rank" in finding.says


def test_what_went_wrong_is_told_by_the_rank_it_went_wrong_on():
    reports = [
        Report(0, None, error="PeerError: another rank has failed", exit_code=76),
        Report(1, None, error="Traceback ...\nValueError: 7 is no number of rows", exit_code=70),
    ]
    (finding,) = OneCurve.judge(reports, SETTING)
    assert finding.says.startswith("rank 1: ")
    assert "7 is no number of rows" in finding.says


SAID = """loading
Fatal Python error: Segmentation fault

Thread 0x00007f35 (most recent call first):
  File "/home/me/lib/threading.py", line 331 in wait
%s
Thread 0x00007f36 (most recent call first):
  File "/home/me/lib/selectors.py", line 9 in select
  File "/home/me/lib/wrapper.py", line 7 in wrapped
  File "/home/me/freescale/train/loop.py", line 30 in train
  File "/home/me/freescale/app/main.py", line 5 in main

Extension modules: numpy.random._common (total: 1)
"""

MET = """
Current thread 0x00007f37 (most recent call first):
  File "/home/me/torch/profiler/profiler.py", line 224 in stop
  File "/home/me/freescale/train/accounts/kernel_watch.py", line 66 in stop
"""


def test_a_rank_that_a_signal_ended_tells_where_it_stood(tmp_path):
    """Only its number was told, and what had crashed was anybody's guess."""
    where = " in profiler.py:224 stop < kernel_watch.py:66 stop"
    main = " in a library's thread, while Python was in selectors.py:9 select < wrapper.py:7 wrapped < loop.py:30 train"
    for said, told in (
        (SAID % MET, where),
        (SAID % "", f"{main} < main.py:5 main"),
        ("falling\nThread over\n", ""),
    ):
        words = worlds._last_words("x" * 9000 + said)
        assert len(words) <= 4000
        reports = [Report(0, None, error=words, exit_code=-11), Report(1, {"losses": []})]
        (finding,) = OneCurve.judge(reports, SETTING)
        assert finding.says == f"rank 0 was ended by signal 11{told}"


def test_a_curve_that_leaves_the_other_is_found():
    good = {"losses": [4.0, 3.0], "alone": [4.0, 3.0 * (1 + 1e-12)], "weights_apart": 1e-13, "tensors": 3}
    assert judged(OneCurve, good, {})[0] == "proven"
    assert judged(OneCurve, {**good, "losses": [4.0, 3.0 + 1e-6]}, {})[0] == "not proven"
    assert judged(OneCurve, {**good, "weights_apart": 1e-3}, {})[0] == "not proven"


def test_one_bit_of_one_rank_is_found():
    same = {"differing": [], "tensors": 3, "losses_equal": True, "steps": 12}
    assert judged(SameBits, same, same)[0] == "proven"
    status, says = judged(SameBits, same, {**same, "differing": ["table.item.weight"]})
    assert (status, "rank 1: table.item.weight" in says) == ("not proven", True)


def test_a_wrong_clock_is_named():
    right, wrong = {"ahead_s": 0.001, "error_s": 0.0005}, {"ahead_s": -75.0, "error_s": 0.001}
    assert judged(Clocks, right, right)[0] == "proven"
    status, says = judged(Clocks, right, right, wrong)
    assert (status, "clock of rank 2 is 75.0 s behind" in says) == ("not proven", True)


def test_a_slow_rank_is_named_and_a_little_slower_one_is_not():
    assert judged(EvenRanks, {"ms": 10.0}, {"ms": 11.0}, {"ms": 10.2})[0] == "proven"
    status, says = judged(EvenRanks, {"ms": 10.0}, {"ms": 13.0}, {"ms": 10.2})
    assert (status, "rank 1 takes 1.27 times as long" in says) == ("not proven", True)
    status, says = judged(EvenRanks, {"ms": 13.0}, {"ms": 10.0})
    assert (status, "rank 0 takes 1.30 times as long" in says) == ("not proven", True)


def test_a_wrong_number_names_the_pair_and_hides_the_rates():
    rates = [{"bytes": 4096, "us": 100.0, "gb_s": 0.04}, {"bytes": 8 << 20, "us": 9000.0, "gb_s": 0.9}]
    good = {"engine": "x", "sm_free": True, "exchanges": 300, "seconds": 1.0, "wrong_from": [0, 0]}
    status, says = judged(Transports, {**good, "rates": rates}, {**good, "rates": rates})
    assert (status, "every number right" in says) == ("proven", True)
    status, says = judged(Transports, good, {**good, "wrong_from": [3, 0]})
    assert (status, "from rank 0 to rank 1" in says) == ("not proven", True)
    assert judged(Transports, {"not_usable": "no GPU"}, {"not_usable": "no GPU"}) == ("not tried", "no GPU")


def test_a_folder_that_is_not_shared_is_told_as_the_training_would():
    problem = {"problem": "run.out is not shared: rank 1 does not see", "got": "x"}
    assert judged(SharedFolder, {"problem": ""}, {"problem": ""})[0] == "proven"
    assert judged(SharedFolder, problem, problem)[0] == "not proven"


def killed(*others: Report) -> tuple[str, str]:
    (finding,) = KilledRank.judge([*others, Report(len(others), None, exit_code=-9, seconds=5.0)], SETTING)
    return finding.status, finding.says


def test_a_killed_rank_must_be_named_by_all_and_soon():
    told = {"heard": "PeerError: rank 2 ended without a word", "seconds": 1.0}
    late = {**told, "seconds": 12.0}
    vague = {"heard": "RuntimeError: Connection closed by peer", "seconds": 1.0}
    assert killed(Report(0, told), Report(1, told))[0] == "proven"
    assert (
        killed(Report(0, told), Report(1, None, error="error: rank 2 has ended", seconds=9.0))[0] == "proven"
    )
    assert (
        killed(Report(0, told), Report(1, None, error="error: rank 2 has ended", seconds=29.0))[0]
        == "not proven"
    )
    assert killed(Report(0, told), Report(1, late))[0] == "not proven"
    status, says = killed(Report(0, told), Report(1, vague))
    assert (status, "ranks [1] did not name it" in says) == ("not proven", True)
    status, says = killed(Report(0, told), Report(1, None, timed_out=True, exit_code=-9, seconds=60.0))
    assert (status, says) == (
        "not proven",
        "rank 2 was killed, and ranks 1 did not come to an end within 60 s",
    )
    (finding,) = KilledRank.judge([Report(0, told), Report(1, {"heard": ""}, exit_code=0)], SETTING)
    assert "was to be killed and was not" in finding.says


def test_other_versions_are_named():
    one = dict.fromkeys(
        ("freescale", "torch", "python", "nccl", "driver", "triton", "numpy", "processor"), "1"
    )
    assert judged(Machine, one, one)[0] == "proven"
    assert judged(Machine, one, {**one, "torch": "2"}) == ("not proven", "rank 1 has torch 2, rank 0 1")


def test_bits_that_do_not_come_back_are_found():
    one = {"bytes": 10**6, "seconds": [0.1, 0.2, 0.1], "wrong": []}
    assert judged(WrittenAndRead, one, one)[0] == "proven"
    assert judged(WrittenAndRead, one, {**one, "wrong": ["item"]}) == (
        "not proven",
        "ranks [1] read other bits than they wrote",
    )


def test_a_prediction_must_meet_step_and_bubble():
    real = {"all off": {"step_ms": 100.0, "bubble": 0.3}, "balance": {"step_ms": 80.0, "bubble": 0.1}}
    near = {"all off": {"step_ms": 104.0, "bubble": 0.32}, "balance": {"step_ms": 79.0, "bubble": 0.09}}
    far = {**near, "balance": {"step_ms": 60.0, "bubble": 0.09}}
    wrong = {**near, "balance": {"step_ms": 79.0, "bubble": 0.2}}
    assert judged(Prediction, {"measured": real, "predicted": near}, {"measured": {}})[0] == "proven"
    assert judged(Prediction, {"measured": real, "predicted": far}, {"measured": {}})[0] == "not proven"
    assert judged(Prediction, {"measured": real, "predicted": wrong}, {"measured": {}})[0] == "not proven"
    told = judged(Prediction, {"measured": real, "predicted": near, "links": "h200"}, {"measured": {}})[1]
    assert "links between GPUs are those of the preset h200" in told


def test_balance_must_lessen_the_wait_and_keep_the_losses():
    def way(straggler: float, loss: float = 3.0) -> list[dict[str, Any]]:
        shares = {"bubble": straggler + 0.1, "straggler": straggler, "comm": 0.05, "host": 0.05}
        return [{"losses": [4.0, loss], "step_ms": 10.0, "imbalance": 1 + straggler, **shares}] * 2

    assert judged(LessBubble, {"all off": way(0.3), "all on": way(0.02)}, {})[0] == "proven"
    assert judged(LessBubble, {"all off": way(0.1), "all on": way(0.2)}, {})[0] == "not proven"
    assert judged(LessBubble, {"all off": way(0.3), "all on": way(0.02, 3.1)}, {})[0] == "not proven"


def test_ranks_on_gpus_have_a_sample_for_each_of_their_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short histories would leave them idle for their hosts, and nothing else would be seen."""
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=32)
    )
    for device, batch, length, run in (("cuda", 32, 1000, (72, 24)), ("cpu", 12, 100, (48, 12))):
        ranks = Ranks(rank=0, num_ranks=1, device=torch.device(device))
        config = load_config(None, runs.long_tailed(ranks))
        assert (config.data.global_batch, config.synthetic.mean_length) == (batch, length)
        assert config.synthetic.users >= 2 * batch
        assert runs.length_of(ranks, 48) == run


@pytest.mark.parametrize(
    ("hardware", "device", "cluster"),
    [
        ("2 cores of x86", "cpu", "cpu"),
        ("NVIDIA H200", "cuda", "h200"),
        ("NVIDIA B200", "cuda", "b200"),
        ("NVIDIA A100-SXM4", "cuda", "h100"),
    ],
)
def test_links_are_those_of_the_gpu_or_of_an_h100(hardware: str, device: str, cluster: str) -> None:
    profile: Any = SimpleNamespace(hardware=hardware, device=device)
    assert prediction._cluster_of(profile) == cluster


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({}, "proven", "ended on 1 of 1 ranks"),
        ({"exchange": False}, "not proven", "ended on 0 of 1 ranks"),
        ({"exchange": False, "says_sm_free": False}, "not tried", "it takes SMs and says so"),
        ({"tiny kernel": True}, "not proven", "a tiny kernel ended beside"),
        # The first hog let those of the driver in: what it proved was nothing.
        ({"copy inside": True}, "not proven", "a copy inside the GPU ended beside"),
    ],
)
def test_nothing_that_takes_an_sm_may_end_beside_one_that_takes_none(changed, status, words):
    evidence = {"exchange": True, "exchange right": True, "exchange held": True, "right afterwards": True}
    evidence |= {"tiny kernel": False, "copy inside": False, "holds": True}
    evidence |= {"says_sm_free": True, "engine": "x", "exchange ms": 1.0, **changed}
    found, says = judged(SmFree, evidence)
    assert found == status
    assert words in says


@pytest.mark.parametrize(
    ("slowdown", "sm_free", "sharing", "status"),
    [
        (1.01, True, 0, "proven"),
        (1.2, True, 0, "not proven"),
        (1.2, True, 4, "not proven"),
        (1.2, False, 0, "not tried"),
    ],
)
def test_a_gemm_may_lose_little_beside_a_transport_that_takes_no_sm(slowdown, sm_free, sharing, status):
    one = {"slowdown": slowdown, "gb_s_alone": 40.0, "gb_s_loaded": 30.0, "rate_kept": 0.75}
    jobs = {"GEMM 4096^3": one, "HSTU layer": {**one, "slowdown": 9.0}}
    found, says = judged(
        Contention, {"sm_free": sm_free, "engine": "copies", "sharing": sharing, "jobs": jobs}, {}
    )
    assert found == status
    assert f"{slowdown:.2f} times as long" in says
    assert ("4 ranks that share a GPU" in says) is (sharing == 4), "why, where it is not the transport"
