"""Another user of the machine cannot join a run, read what it holds, or hold it up."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freescale.comm.gloo_sockets import _read
from tests.other_user import OTHER, in_own_network, only_root, start_as_other_user, unix_names, wait_for
from tests.small_run import SMALL, train_small

pytestmark = pytest.mark.timed

pytestmark = [only_root, pytest.mark.timeout(300)]

STEPS = 20
RECIPE = ("model.dtype=float64", f"run.steps={STEPS}", "run.eval_every=1000")


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder for temporary files that all users may use, as /tmp is, with nobody else's in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder


def start(out: Path, temporary: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "freescale", "train", "--nproc", "2", *SMALL, *RECIPE, f"run.out={out}"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def children(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket at which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            files = list(Path(f"/proc/{pid}/fd").iterdir())
            inodes |= {os.readlink(file)[8:-1] for file in files if os.readlink(file).startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, near, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                found.add(_read(near))
    return found


class Attack:
    """A process of another user that does all the harm it can to a run, from its start or from its first step on."""

    def __init__(self, run: subprocess.Popen[str], folder: Path, *, pause_s: float) -> None:
        self._run, self._pause_s = run, pause_s
        self._targets = folder / "targets.json"
        self.doors: set[tuple[str, int]] = set()
        self._now: set[tuple[str, int]] = set()
        self._write()
        self._looks = threading.Thread(target=self._look)
        self._looks.start()
        targets = str(self._targets)
        self._process = start_as_other_user(lambda: do_harm(targets, folder, pause_s))

    def _look(self) -> None:
        while self._run.poll() is None:
            doors = listening(children(self._run.pid))
            if doors != self._now:
                self._now, self.doors = doors, self.doors | doors
                self._write()
            time.sleep(self._pause_s)
        self._targets.unlink()

    def _write(self) -> None:
        pids = children(self._run.pid)
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps({"pids": pids, "doors": sorted(self._now)}))
        new.chmod(0o644)
        new.rename(self._targets)

    def result(self) -> dict[str, Any]:
        self._looks.join()
        return wait_for(self._process)


def do_harm(targets: str, temporary: Path, pause_s: float) -> dict[str, Any]:
    """As the other user, until the run is over: what could be read and connected to, and how often it was tried."""
    assert os.geteuid() == OTHER
    done: dict[str, Any] = {"read": set(), "joined": set(), "tries": 0}
    held: dict[tuple[str, int], list[socket.socket]] = {}
    with contextlib.suppress(FileNotFoundError):
        while True:
            known = json.loads(Path(targets).read_text())
            done["tries"] += 1
            done["read"] |= set(readable(known["pids"], temporary))
            done["joined"] |= set(call_all(unix_names()))
            for gone in set(held) - set(map(tuple, known["doors"])):
                held.pop(gone)  # the port may be somebody else's by now
            for host, port in known["doors"]:
                knock(held.setdefault((host, port), []), host, port)
            time.sleep(pause_s)
    return done


def readable(pids: list[int], temporary: Path) -> Iterator[str]:
    """What another user may open of these processes, of shared memory and of temporary files."""
    private = [Path(f"/proc/{pid}/{what}") for pid in pids for what in ("environ", "maps", "mem", "fd")]
    shared = [each for each in Path("/dev/shm").iterdir() if "freescale" in each.name]
    files = [each for each in temporary.iterdir() if each.name.startswith("freescale")]
    for path in (*private, *shared, *files):
        with contextlib.suppress(OSError):
            if os.listdir(path) if path.is_dir() else path.open("rb").read(1):
                yield str(path)


def call_all(names: list[str]) -> Iterator[str]:
    for name in names:
        caller = socket.socket(socket.AF_UNIX)
        caller.settimeout(0.1)
        with contextlib.suppress(OSError):
            caller.connect(name)
            yield name


def knock(held: list[socket.socket], host: str, port: int) -> None:
    """Silent connections, noise, and the first words of a rank of gloo: the number of a connection."""
    if len(held) > 300:
        return
    for words in (b"", b"\xff" * 64, *(number.to_bytes(8, "little") for number in range(4))):
        caller = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        caller.setblocking(False)
        held.append(caller)
        with contextlib.suppress(OSError):
            caller.connect((host, port))
        with contextlib.suppress(OSError):
            caller.send(words)


def wait_for_first_step(run: subprocess.Popen[str], out: Path) -> None:
    metrics = out / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and '"event": "step"' in metrics.read_text()):
        time.sleep(0.01)


def is_connected(caller: socket.socket) -> bool:
    try:
        caller.getpeername()
    except OSError:
        return False
    return True


def attacked(out: Path, temporary: Path, *, from_start: bool) -> tuple[int, str, dict[str, Any], set[Any]]:
    """Exit code and words of a run under attack, what the other user got, and where the run listened."""
    run = start(out, temporary)
    if not from_start:
        wait_for_first_step(run, out)
    # A start is over in milliseconds; a run that goes on is not to be starved by those who look on.
    attack = Attack(run, temporary, pause_s=0.001 if from_start else 0.02)
    said, _ = run.communicate(timeout=250)
    return run.returncode, said, attack.result(), attack.doors


@pytest.mark.slow
def test_a_run_under_attack_takes_the_same_steps(tmp_path, everybodys):
    out = tmp_path / "run"
    code, said, harm, doors = in_own_network(lambda: attacked(out, everybodys, from_start=False))
    assert code == 0, said
    assert losses(out) == pytest.approx(train_small(RECIPE)["losses"], rel=1e-9)
    assert doors, "gloo listens somewhere"
    assert {host for host, _ in doors} == {"127.0.0.1"}, "no network reaches them"
    assert harm["tries"] > 3
    assert harm["read"] == harm["joined"] == set()


@pytest.mark.slow
def test_an_attack_on_the_start_lets_nobody_in(tmp_path, everybodys):
    """In the first milliseconds of a port anybody may connect: then the run says so and ends, or it does not matter."""
    out = tmp_path / "run"
    code, said, harm, _ = in_own_network(lambda: attacked(out, everybodys, from_start=True))
    assert harm["read"] == harm["joined"] == set()
    if code == 0:
        assert losses(out) == pytest.approx(train_small(RECIPE)["losses"], rel=1e-9)
    else:
        assert "another user of this machine has connected" in said
