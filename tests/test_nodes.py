"""Network namespaces as machines: they are apart, their wire is as slow as asked for, and they leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes import PORT, Node, nodes, why_no_nodes

pytestmark = pytest.mark.timed

SERVE = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("ready", flush=True)
    caller, _ = server.accept()
    with caller:
        while data := caller.recv(1 << 20):
            caller.sendall(data[:1] if len(data) > 1 else data)
"""
# The answer to one byte, then until the last of many bytes is through.
ASK = f"""
import socket, sys, time
with socket.create_connection((sys.argv[1], {PORT}), timeout=10) as line:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.monotonic()
    line.sendall(b"x")
    line.recv(1)
    trip = time.monotonic() - began
    if len(sys.argv) > 2:
        print("met", flush=True)
        sys.stdin.read(1)
        line.sendall(b"x")
        line.recv(1)
    line.sendall(bytes(250_000))
    line.shutdown(socket.SHUT_WR)
    while line.recv(1 << 16):
        pass
print(trip, time.monotonic() - began - trip)
"""


@pytest.fixture(autouse=True)
def _permitted() -> None:
    if reason := why_no_nodes():
        pytest.skip(reason)


def serve(machine: Node) -> None:
    server = machine.popen([sys.executable, "-IS", "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.stdout.close()


def test_machines_have_names_and_networks_of_their_own() -> None:
    with nodes(3) as machines:
        serve(machines[1])
        said = machines[2].run(["hostname"], capture_output=True, text=True, check=True)
        assert said.stdout == "node-c\n"
        there = machines[2].run([sys.executable, "-IS", "-c", ASK, "node-b"], capture_output=True)
        assert there.returncode == 0
        here = machines[2].run(
            [sys.executable, "-IS", "-c", ASK, "localhost"], capture_output=True, text=True
        )
        assert "ConnectionRefusedError" in here.stderr
        sent, received = machines[2].bytes_on_wire()
        assert 250_000 < sent < 300_000 > received > 0


def test_the_wire_is_as_slow_as_asked_for() -> None:
    with nodes(2, delay_ms=15, rate_mbit=10) as machines:
        serve(machines[0])
        asked = machines[1].run([sys.executable, "-IS", "-c", ASK, "node-a"], capture_output=True, text=True)
        trip, bulk = map(float, asked.stdout.split())
        assert trip >= 0.030
        assert bulk >= 0.2


def test_a_cut_link_loses_nothing_once_it_is_back() -> None:
    with nodes(2) as machines:
        serve(machines[0])
        asking = machines[1].popen(
            [sys.executable, "-IS", "-c", ASK, "node-a", "pause"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert asking.stdin is not None
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"met\n"
        assert asking.pid in machines[1].pids()
        machines[0].link_down()
        asking.stdin.write(b"x")
        asking.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            asking.wait(0.3)
        machines[0].link_up()
        assert asking.wait(20) == 0
        asking.stdout.close()


@pytest.mark.parametrize("switched", [False, True])
def test_nothing_is_left_when_whoever_made_them_is_killed(switched: bool) -> None:
    script = (
        "import subprocess, time; from tests.nodes import nodes\n"
        f"with nodes(2, delay_ms={5 * switched}) as machines:\n"
        "    left = machines[0].popen(['setsid', 'sleep', '600'])\n"
        "    print(left.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    )
    assert maker.stdout is not None
    left = int(maker.stdout.readline())
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{left}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{left}").exists()
