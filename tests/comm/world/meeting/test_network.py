"""A host name that is 127.0.1.1: gloo is told the interface that the others reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.comm.world.meeting import network
from freescale.comm.world.meeting.launchers import Membership
from freescale.comm.world.meeting.network import choose_interface

REPOSITORY = Path(__file__).parents[4]
WHO = Membership(
    launcher="torchrun", rank=2, num_ranks=4, local_rank=0, local_num_ranks=2, master="node-a", port=29500
)


@pytest.fixture
def names(monkeypatch):
    """names["box"] = addresses of the own name; the machine has eth0 and ib0, and ib0 leads to node-a."""
    known = {"box": ["127.0.1.1"], "node-a": ["10.0.0.1"]}
    monkeypatch.setattr(network.socket, "gethostname", lambda: "box")
    monkeypatch.setattr(network, "addresses_of", lambda host: known.get(host, []))
    monkeypatch.setattr(network, "_interfaces", lambda: {"192.168.0.5": "eth0", "10.0.0.5": "ib0"})
    routes = {"10.0.0.1": "10.0.0.5", "192.0.2.1": "192.168.0.5"}
    monkeypatch.setattr(network, "_source_towards", lambda address: routes.get(address, "127.0.0.1"))
    return known


def test_the_interface_that_leads_to_the_first_rank_is_named(names):
    environment: dict[str, str] = {}
    said = choose_interface(WHO, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert said == (
        "this machine's name, box, is 127.0.1.1 here, which others cannot reach: GLOO_SOCKET_IFNAME=ib0"
    )


def test_on_the_first_machine_itself_it_is_the_one_that_leads_to_the_rest(names):
    names["node-a"] = ["127.0.1.1"]
    environment: dict[str, str] = {}
    choose_interface(WHO, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_machine_that_cannot_say_asks_for_it(names, monkeypatch):
    names["node-a"], names["box"] = [], []
    monkeypatch.setattr(network, "_source_towards", lambda address: "")
    environment: dict[str, str] = {}
    said = choose_interface(WHO, environment)
    assert "box, has no address here; set GLOO_SOCKET_IFNAME" in said
    assert environment == {}


def test_nothing_is_touched_where_nothing_is_wrong(names):
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert choose_interface(WHO, chosen) is None
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert choose_interface(Membership(), nothing := {}) is None
    assert nothing == {}
    names["box"] = ["127.0.1.1", "10.0.0.5"]
    assert choose_interface(WHO, {}) is None


@pytest.mark.parametrize("master", ["node-a", None])
def test_ranks_of_one_machine_use_loopback(names, monkeypatch, master):
    one_machine = Membership(launcher="torchrun", num_ranks=2, local_num_ranks=2, master=master)
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert choose_interface(one_machine, environment := {}) is None
    assert environment == {"GLOO_SOCKET_IFNAME": "lo"}
    assert choose_interface(one_machine, chosen := {"GLOO_SOCKET_IFNAME": "eth0"}) is None
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo0")])
    assert choose_interface(one_machine, nothing := {}) is None
    assert nothing == {}


def test_this_machines_interfaces_have_names():
    if sys.platform == "linux":
        assert all(name in os.listdir("/sys/class/net") for name in network._interfaces().values())
        assert network._source_towards("127.0.0.1") == "127.0.0.1"


JOIN = """
import sys, torch
from freescale.comm.world import join_ranks
with join_ranks(device="cpu", timeout_s=90) as ranks:
    sys.stdout.write(str(ranks.sum(torch.tensor([10 ** ranks.rank])).tolist()))
    sys.stdout.flush()
    ranks.barrier()
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_nodes(tmp_path):
    """Two network namespaces joined by a veth pair; each calls itself 127.0.1.1, as Debian does."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    tag = f"fs{os.getpid() % 10000}"
    spaces = [f"{tag}a", f"{tag}b"]
    made = []
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
            made.append(space)
        run(
            "ip",
            "link",
            "add",
            f"{tag}x",
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            f"{tag}y",
            "netns",
            spaces[1],
        )
        for space, device, address in (
            (spaces[0], f"{tag}x", "10.77.0.1/24"),
            (spaces[1], f"{tag}y", "10.77.0.2/24"),
        ):
            run("ip", "-n", space, "addr", "add", address, "dev", device)
            run("ip", "-n", space, "link", "set", device, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(made)
        pytest.skip(f"network namespaces are not permitted here: {error}")
    hosts = []
    for node, name in enumerate(("node-a", "node-b")):
        hosts.append(tmp_path / f"hosts-{name}")
        first = "127.0.1.1 node-a" if node == 0 else "10.77.0.1 node-a\n127.0.1.1 node-b"
        hosts[-1].write_text(f"127.0.0.1 localhost\n{first}\n")
    yield list(zip(spaces, ("node-a", "node-b"), hosts))
    _remove(made)


def _remove(spaces: list[str]) -> None:
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=20)


def test_ranks_of_two_machines_that_call_themselves_loopback_join(two_nodes, python):
    """Failed before: gloo gave the other machine the address 127.0.1.1."""
    started = []
    for rank, (space, name, hosts) in enumerate(two_nodes):
        inside = f"hostname {name} && mount --bind {hosts} /etc/hosts && exec {python} -c '{JOIN}'"
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            "PATH": os.environ["PATH"],
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node-a",
            "MASTER_PORT": "29555",
        }
        command = ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "sh", "-c", inside]
        started.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        answers = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    for out, said in answers:
        assert out == "[11]", said
        assert "is 127.0.1.1 here, which others cannot reach: GLOO_SOCKET_IFNAME=" in said
