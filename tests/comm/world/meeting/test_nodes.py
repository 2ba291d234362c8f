"""Several machines under our own launcher: options, what every machine is told, and starts that cannot succeed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from freescale.comm.world import launcher
from freescale.comm.world.meeting import network, nodes
from freescale.comm.world.meeting.network import free_port
from freescale.comm.world.meeting.nodes import Nodes, check_start, nodes_asked_for
from freescale.errors import TrainingError

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def asked(environment: dict[str, str] | None = None, *, nproc: int = 1, **options: object) -> Nodes | None:
    given = {"nnodes": None, "node_rank": None, "master": None, **options}
    return nodes_asked_for(nproc=nproc, environment=environment or {}, **given)


def refusal(environment: dict[str, str] | None = None, **options: object) -> str:
    with pytest.raises(TrainingError) as caught:
        asked(environment, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("master", "host", "port", "shown"),
    [
        ("node-a:29501", "node-a", 29501, "node-a:29501"),
        ("node-a", "node-a", 29500, "node-a:29500"),
        ("10.0.0.1:80", "10.0.0.1", 80, "10.0.0.1:80"),
        ("[fd00::1]:29501", "fd00::1", 29501, "[fd00::1]:29501"),
        ("[fd00::1]", "fd00::1", 29500, "[fd00::1]:29500"),
        ("fd00::1", "fd00::1", 29500, "[fd00::1]:29500"),
    ],
)
def test_the_first_machine_is_a_host_and_a_port(master, host, port, shown):
    found = asked(nnodes=2, node_rank=1, master=master)
    assert found == Nodes(2, 1, host, port)
    assert found.master == shown


@pytest.mark.parametrize("master", ["node-a:", "node-a:x", "node-a:70000", ":29500", "node-a:0"])
def test_what_is_no_host_and_port_is_refused(master):
    said = refusal(nnodes=2, node_rank=0, master=master)
    assert "--master is no HOST:PORT" in said
    assert f"got:     --master {master}" in said


def test_options_that_belong_together_are_named_when_one_is_missing():
    assert "--node-rank is missing" in refusal(nnodes=2, master="a:1")
    assert "--master is missing" in refusal(nnodes=2, node_rank=0)
    assert "--nnodes is missing" in refusal(node_rank=0, master="a:1")
    assert "counts from 0 to --nnodes - 1" in refusal(nnodes=2, node_rank=2, master="a:1")


def test_one_machine_needs_no_master():
    assert asked(nnodes=1, node_rank=0, nproc=4) is None
    assert asked(nproc=4) is None
    assert asked() is None


def test_a_rank_starts_no_ranks():
    assert "a rank already" in refusal({"RANK": "0"}, nnodes=2, node_rank=0, master="a:1")
    assert asked({"RANK": "0"}, nproc=4) is None


def test_one_slurm_task_a_node_starts_the_ranks_of_its_node():
    found = asked(SLURM, nproc=8)
    assert (found.num_nodes, found.node, found.host) == (2, 1, "node01")
    assert asked(SLURM) is None  # without --nproc the task is a rank


def test_slurm_tasks_that_share_a_node_start_no_ranks():
    crowded = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    said = refusal(crowded, nproc=4)
    assert "Slurm has started 2 processes already" in said
    assert "--ntasks-per-node=1" in said


def test_inside_an_allocation_our_launcher_works_as_anywhere():
    batch_script = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "WORLD_SIZE": "4"}
    assert asked(batch_script, nproc=4) is None


WRITE = """
import json, os, sys
with open(os.path.join(sys.argv[1], os.environ["LOCAL_RANK"]), "w") as file:
    json.dump(dict(os.environ), file)
"""


def test_every_machine_tells_its_ranks_their_numbers(tmp_path):
    launcher.launch([str(tmp_path)], num_ranks=2, program=("-c", WRITE), nodes=Nodes(3, 2, "node-a", 1234))
    told = [json.loads((tmp_path / local).read_text()) for local in ("0", "1")]
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [[each[name] for name in names] for each in told] == [
        ["4", "6", "0", "2", "2", "node-a", "1234"],
        ["5", "6", "1", "2", "2", "node-a", "1234"],
    ]
    assert all(launcher.RENDEZVOUS not in each for each in told)  # that is a file of this machine


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def start(asked_for: Nodes, **how: float) -> list[str]:
    lines: list[str] = []
    check_start(asked_for, say=lines.append, **how)
    return lines


def test_an_unknown_host_is_said_at_once_and_refused_after_a_while(monkeypatch):
    monkeypatch.setattr(nodes, "addresses_of", lambda host: [])
    lines: list[str] = []
    with pytest.raises(TrainingError, match="a host this machine does not know: node-x"):
        check_start(Nodes(2, 0, "node-x", 29500), say=lines.append, names_s=0.1)
    assert lines == ["this machine does not know node-x of --master; asking again for 0.1 s"]


def test_a_name_that_a_cluster_learns_later_is_waited_for(monkeypatch):
    answers = [[], [], ["127.0.0.1"]]
    monkeypatch.setattr(nodes, "addresses_of", lambda host: answers.pop(0))
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: None)
    assert len(start(Nodes(2, 0, "pod-0.run", free_port()))) == 1
    assert answers == []


def test_a_port_that_is_taken_is_said_at_once(taken):
    with pytest.raises(TrainingError, match=f"port {taken} of this machine cannot be listened on"):
        start(Nodes(2, 0, "127.0.0.1", taken))


def test_a_port_taken_on_another_address_of_the_machine_is_taken(taken):
    """The store listens on all of them."""
    with pytest.raises(TrainingError, match="cannot be listened on"):
        start(Nodes(2, 0, "127.0.0.2", taken))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_leads_every_machine_back_to_itself_is_told(host):
    assert "no other one comes here by it" in " ".join(start(Nodes(2, 0, host, free_port())))


def test_the_first_machine_must_be_the_one_that_master_names():
    with pytest.raises(TrainingError, match="--master names another machine"):
        start(Nodes(2, 0, "192.0.2.77", 29500))


def test_other_machines_must_not_be_led_back_to_themselves():
    with pytest.raises(TrainingError, match="leads back to this machine") as caught:
        start(Nodes(2, 1, "127.0.1.1", 29500))
    assert "127.0.1.1 is 127.0.1.1 here" in str(caught.value)


def test_a_first_machine_that_does_not_listen_yet_is_waited_for_and_said(monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(nodes, "addresses_of", lambda host: ["10.1.2.3"])
    monkeypatch.setattr(nodes.socket, "create_connection", refused)
    said = start(Nodes(4, 1, "node-a", 29500))
    assert said == ["waiting for node-a:29500, the first of 4 machines: Connection refused"]


def test_a_free_port_and_a_first_machine_that_listens_need_no_word(taken, monkeypatch):
    monkeypatch.setattr(nodes, "is_loopback", lambda address: False)
    assert start(Nodes(2, 1, "127.0.0.1", taken)) == []
    assert start(Nodes(2, 0, "127.0.0.1", free_port())) == []


def test_names_and_loopback():
    assert network.addresses_of("127.0.1.1") == ["127.0.1.1"]
    assert network.is_loopback("127.0.1.1")
    assert network.is_loopback("::1")
    assert not network.is_loopback("fe80::1%eth0")
    assert network.addresses_of("no such name . at all") == []
