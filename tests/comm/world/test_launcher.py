"""The launcher: ranks know who they are, and one failure ends all with one message."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freescale.comm.world import launcher as launch_module
from freescale.comm.world.launcher import launch
from freescale.comm.world.watch import report_failure
from freescale.errors import EXIT_UNEXPECTED, DataError, Preempted, TrainingError
from freescale.trace.stages import stage
from tests.effort import slow

pytestmark = pytest.mark.timed

REPOSITORY = Path(__file__).parents[3]

# Stands in for the interpreter: instead of `-m freescale PROGRAM` it runs PROGRAM itself.
PYTHON = sys.executable  # before a test stands something in its place
STAND_IN = f"""#!{PYTHON}
import os, signal, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
rank = int(os.environ["RANK"])
place = os.path.join(os.environ["SEEN"], f"pid-{{rank}}")
with open(place + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(place + ".new", place)
while sum(".new" not in name for name in os.listdir(os.environ["SEEN"])) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
exec(sys.argv[-1])
"""

FAIL = """
from freescale.comm.world.watch import report_failure
from freescale.errors import DataError
from freescale.trace.stages import stage

def fail(error, step=None):
    try:
        with stage("train", step=step):
            raise error
    except Exception as raised:
        report_failure(raised)
    sys.exit(1)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(program, num_ranks) launches a program and returns where the ranks left their marks."""
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setattr(launch_module.sys, "executable", str(script))
    monkeypatch.setattr(launch_module, "_GRACE_S", 1.0)
    monkeypatch.setenv("SEEN", str(seen))

    def run(program: str, num_ranks: int) -> Path:
        launch([program], num_ranks=num_ranks)
        return seen

    run.seen, run.script, run.gone_within_s = seen, script, 0.0
    return run


@pytest.fixture
def run_with_torch(run, python):
    """The same for programs that import torch, which they find imported."""
    run.script.write_text(STAND_IN.replace(PYTHON, python, 1))
    run.gone_within_s = 5.0  # `tests/warm_python.py` ends what it runs a moment after whoever asked for it
    return run


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def pids(seen: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(seen.glob("pid-*")) if path.suffix != ".new"]


def assert_fails_fast(run, program: str, num_ranks: int = 3, *, within: float = 45.0) -> str:
    """Programs sleep for 60 s where nobody ends them; the bound leaves room for a machine with other work."""
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        run(program, num_ranks)
    assert time.monotonic() - started < within
    assert len(pids(run.seen)) == num_ranks
    deadline = time.monotonic() + run.gone_within_s
    while any(is_alive(pid) for pid in pids(run.seen)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids(run.seen))
    return str(caught.value)


def test_every_rank_is_told_who_it_is(run):
    program = (
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'FREESCALE_RENDEZVOUS')\n"
        "line = ' '.join(os.environ[name] for name in names)\n"
        "open(os.path.join(os.environ['SEEN'], f'told-{rank}'), 'w').write(line)"
    )
    describe_transport = [path.read_text().split() for path in sorted(run(program, 3).glob("told-*"))]
    assert [line[:4] for line in describe_transport] == [[str(r), str(r), "3", "3"] for r in range(3)]
    assert len({line[4] for line in describe_transport}) == 1


def test_a_known_error_ends_all_and_names_rank_stage_and_step(run):
    message = assert_fails_fast(
        run, FAIL + "if rank == 1: fail(DataError('the loss is nan', got='batch 7'), step=12)\ntime.sleep(60)"
    )
    assert message.startswith("rank 1 failed in stage 'train' at step 12: the loss is nan")
    assert "batch 7" in message
    assert message.count("failed") == 1


def test_a_known_error_explains_the_connections_it_broke(run, monkeypatch):
    monkeypatch.setattr(launch_module, "_GRACE_S", 15.0)  # the last rank to fail is the one to be heard
    message = assert_fails_fast(
        run,
        FAIL
        + "if rank == 2: time.sleep(0.3); fail(DataError('no such file'))\nfail(RuntimeError('connection closed'))",
    )
    assert "rank 2" in message
    assert "no such file" in message
    assert "connection closed" not in message


def test_an_unknown_error_is_told_with_its_type(run):
    message = assert_fails_fast(run, FAIL + "if rank == 0: fail(KeyError('oops'), step=3)\ntime.sleep(60)")
    assert message == "rank 0 failed in stage 'train' at step 3: KeyError: 'oops'"


@pytest.mark.parametrize("name", ["SIGKILL", slow("SIGSEGV")])
def test_a_killed_rank_is_named_with_the_signal(run, name, monkeypatch):
    monkeypatch.setattr(launch_module, "_GRACE_S", 4.0)  # time for the third rank to say where it was
    program = FAIL + (
        f"if rank == 1: os.kill(os.getpid(), signal.{name}); time.sleep(60)\n"
        "if rank == 2: time.sleep(0.3); fail(RuntimeError('connection closed by peer'), step=7)\n"
        "time.sleep(60)"
    )
    message = assert_fails_fast(run, program)
    assert f"rank 1 was killed by {name}" in message
    assert "stage 'train' at step 7" in message
    assert "connection closed" not in message
    assert "run the same command again" in message


def test_a_rank_that_ends_without_a_word_is_named_with_its_exit_code(run):
    message = assert_fails_fast(run, "if rank == 2: sys.exit(3)\ntime.sleep(60)")
    assert message == "rank 2 ended with exit code 3 and no message"


def test_half_a_word_is_as_good_as_none(run):
    program = (
        "import socket\n"
        "line = socket.socket(fileno=int(os.environ['FREESCALE_LAUNCHER_LINE']))\n"
        'if rank == 0: line.send(b\'{"note": {"sta\'); sys.exit(1)\n'
        "time.sleep(60)"
    )
    assert assert_fails_fast(run, program) == "rank 0 ended with exit code 1 and no message"


def test_nothing_is_written_to_a_disk(run, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_module.tempfile, "tempdir", str(tmp_path / "nowhere"))
    run("pass", 2)


def test_ranks_that_do_not_listen_are_killed(run):
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == 0: time.sleep(0.3); sys.exit(1)\n"
        "time.sleep(60)"
    )
    assert_fails_fast(run, program)


def test_an_interrupt_ends_the_ranks(run, monkeypatch):
    def interrupted(processes, lines, requests):
        while len(pids(run.seen)) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_module, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("time.sleep(60)", 2)
    assert len(pids(run.seen)) == 2
    assert not any(is_alive(pid) for pid in pids(run.seen))


def test_ranks_already_started_are_ended_when_one_cannot_be(run, monkeypatch):
    real, started = subprocess.Popen, []

    def third_fails(*args, **kwargs):
        if len(started) == 2:
            raise BlockingIOError("no more processes")
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(launch_module.subprocess, "Popen", third_fails)
    with pytest.raises(BlockingIOError):
        run("time.sleep(60)", 3)
    assert [process.poll() is not None for process in started] == [True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_do_not_outlive_a_killed_launcher(run, how):
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from freescale.comm.world.launcher import launch\n"
        f"sys.executable = {launch_module.sys.executable!r}\n"
        "launch(['time.sleep(60)'], num_ranks=2)"
    )
    launcher = subprocess.Popen([os.path.realpath("/proc/self/exe"), "-c", program])
    deadline = time.monotonic() + 20
    while len(pids(run.seen)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher.send_signal(how)
    launcher.wait(30)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids(run.seen)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids(run.seen) if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids(run.seen)) == 2
    assert left == []


STOP = """
def ended(*_):
    open(os.path.join(os.environ["SEEN"], f"told-{rank}"), "w").close()
    os._exit(codes[rank])
signal.signal(signal.SIGTERM, ended)
if rank == 0: time.sleep(0.5); os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_request_to_stop_is_passed_on_and_ranks_that_saved_have_not_failed(run):
    with pytest.raises(SystemExit) as end:
        run("codes = [75, 75]" + STOP, 2)
    assert end.value.code == 75
    assert sorted(path.name for path in run.seen.glob("told-*")) == ["told-0", "told-1"]


def test_ranks_ended_by_the_request_had_nothing_to_save(run):
    with pytest.raises(Preempted, match="before the first step"):
        run("codes = [143, 143]" + STOP, 2)
    with pytest.raises(
        Preempted, match="before the first step"
    ):  # rank 0, which would say so, had not heard yet
        run("codes = [143, 75]" + STOP, 2)


def test_a_rank_that_fails_while_it_is_told_to_stop_has_failed(run):
    with pytest.raises(TrainingError, match="rank 1 ended with exit code 3"):
        run("codes = [75, 3]" + STOP, 2)


def test_a_connection_broken_by_a_rank_that_stopped_as_told_is_no_failure(run):
    stop = (
        FAIL
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 has heard already, rank 1 not yet
deaf = os.path.join(os.environ["SEEN"], "deaf")
if rank == 0:
    while not os.path.exists(deaf):
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    os._exit(75)
open(deaf, "w").close()
time.sleep(0.3)
fail(RuntimeError("Connection reset by peer"))
"""
    )
    with pytest.raises(SystemExit) as end:
        run(stop, 2)
    assert end.value.code == 75


def test_a_note_tells_stage_step_and_message(monkeypatch, capsys):
    line, of_rank = socket.socketpair(type=socket.SOCK_DGRAM)
    monkeypatch.setenv("FREESCALE_LAUNCHER_LINE", str(of_rank.fileno()))
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(DataError) as caught, stage("evaluate", step=9):
        raise DataError("bad file", got="x.csv")
    report_failure(caught.value)
    assert capsys.readouterr().err == ""  # the launcher will say it
    ranks = launch_module._Listener({4: line})
    ranks.listen()
    failure = launch_module._failure({4: 1}, ranks.notes)
    assert str(failure).startswith("rank 4 failed in stage 'evaluate' at step 9: bad file")
    assert failure.exit_code == 1
    line.close()
    of_rank.close()


def test_a_rank_without_a_free_descriptor_is_heard(monkeypatch, capsys):
    """Ranks that had met their limit of open files each printed the same error."""
    line, of_rank = socket.socketpair(type=socket.SOCK_DGRAM)
    monkeypatch.setenv("FREESCALE_LAUNCHER_LINE", str(of_rank.fileno()))
    monkeypatch.setenv("RANK", "1")
    free = os.dup(line.fileno())
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        report_failure(DataError("too many open files"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert capsys.readouterr().err == ""
    assert b"too many open files" in line.recv(1 << 16)
    line.close()
    of_rank.close()  # still ours


def test_without_a_launcher_a_failure_is_printed_once(monkeypatch, capsys):
    monkeypatch.delenv("FREESCALE_LAUNCHER_LINE", raising=False)
    error = DataError("bad file")
    assert report_failure(error) is report_failure(error)
    assert capsys.readouterr().err == "error: bad file\n"


def test_a_stopped_rank_ends_the_run_after_silent_s(run_with_torch):
    program = (
        "from freescale.comm.world.joining import join_ranks\n"
        "with join_ranks(device='cpu', silent_s=3) as ranks:\n"
        "    ranks.barrier()\n"
        "    if rank == 1: time.sleep(1.5); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    ranks.barrier()\n"
    )
    message = assert_fails_fast(run_with_torch, program, 2)
    assert message.startswith("rank 1 on ")
    assert "has given no sign of life for 3 s" in message


WATCHED = """
from freescale.comm.world.watch import open_watch
import ctypes
watch = open_watch(rank, 2, silent_s=2)
def never_lets_go(): ctypes.PyDLL(None).sleep(60)
"""


def test_a_rank_whose_interpreter_is_held_shows_where_it_stands(run, capfd):
    """It cannot give a sign of life, and nobody knew what it was doing."""
    program = WATCHED + "time.sleep(1.5)\nif rank == 1: never_lets_go()\ntime.sleep(60)"
    message = assert_fails_fast(run, program, 2)
    assert "has given no sign of life for 2 s" in message
    assert "does not let go of its interpreter" in message
    assert "in never_lets_go" in capfd.readouterr().err


def test_a_rank_that_a_library_ends_shows_where_it_stood(run, capfd):
    program = (
        "from freescale.comm.world.joining import join_ranks\n"
        "def gives_up(): os.abort()\n"
        "with join_ranks(device='cpu') as ranks:\n"
        "    if rank == 1: gives_up()\n"
        "    time.sleep(60)"
    )
    message = assert_fails_fast(run, program, 2)
    assert "rank 1 was killed by SIGABRT" in message
    assert "in gives_up" in capfd.readouterr().err


JOIN = """
from freescale.comm.world.joining import join_ranks
import torch
with join_ranks(device="cpu", timeout_s=60) as ranks:
    total = ranks.sum(torch.tensor([1, 10 ** ranks.rank])).tolist()
    same = ranks.sum_on_cpu(torch.tensor([2.0])).tolist()
    ranks.barrier()
open(os.path.join(os.environ["SEEN"], f"sums-{rank}"), "w").write(f"{total} {same} {ranks.num_ranks}")
"""


def test_launched_ranks_join_into_one_group(run_with_torch):
    seen = run_with_torch(JOIN, 2)
    assert [path.read_text() for path in sorted(seen.glob("sums-*"))] == ["[2, 11] [4.0] 2"] * 2


def test_a_rank_killed_inside_a_collective_ends_the_others_that_wait_for_it(run_with_torch):
    program = (
        "from freescale.comm.world.joining import join_ranks\n"
        "import torch\n"
        "with join_ranks(device='cpu', timeout_s=600) as ranks:\n"
        "    ranks.barrier()\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    ranks.sum(torch.ones(1))\n"
    )
    message = assert_fails_fast(run_with_torch, program, 2, within=300)
    assert "rank 1 was killed by SIGKILL" in message


def test_what_nobody_foresaw_on_the_first_rank_is_told_as_that_of_the_first_rank(run_with_torch):
    program = (
        "from freescale.comm.world import from_first, join_ranks\n"
        "def decide(): time.sleep(0.3); raise KeyError('loss')\n"
        "with join_ranks(device='cpu') as ranks: from_first(decide, ranks=ranks, what='ask the judge')\n"
    )
    with pytest.raises(TrainingError) as caught:
        run_with_torch(program, 2)
    assert re.fullmatch(r"rank 0 failed in stage '.*: KeyError: 'loss'", str(caught.value))
    assert caught.value.exit_code == EXIT_UNEXPECTED


def test_a_known_error_of_the_first_rank_is_told_as_that_of_the_first_rank(run_with_torch):
    """The others hear of it at once, and had their note out before the rank that met it."""
    program = (
        "from freescale.comm.world import from_first, join_ranks\n"
        "from freescale.errors import DataError\n"
        "class Late(DataError):\n"
        "    def __str__(self): time.sleep(0.5); return super().__str__()\n"
        "def decide(): raise Late('the file is empty')\n"
        "with join_ranks(device='cpu') as ranks: from_first(decide, ranks=ranks, what='ask')\n"
    )
    with pytest.raises(TrainingError, match=r"^rank 0 failed in stage '.*: the file is empty"):
        run_with_torch(program, 3)
