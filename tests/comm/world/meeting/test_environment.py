"""Who this process is: the variables of every launcher, which of them wins, and what is said when half are missing.

The Slurm and MPI variables below are as Slurm 22.05, Open MPI 4.1 and MPICH 4.0 set them.
"""

from __future__ import annotations

import pytest

from freescale.comm.world.meeting import launchers as module
from freescale.comm.world.meeting.environment import DEFAULT_PORT, own_membership, publish_membership
from freescale.comm.world.meeting.launchers import Membership, first_host, slurm_node, tasks_per_node
from freescale.errors import TrainingError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {  # srun -N2 -n4, the last task
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
ONE_TASK = {
    **SLURM,
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0",
}
BATCH_SCRIPT = {name: value for name, value in SLURM.items() if "_STEP_" not in name} | {"SLURM_PROCID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "657653761",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
POD = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train"}


def message(environment: dict[str, str]) -> str:
    with pytest.raises(TrainingError) as caught:
        own_membership(environment)
    return str(caught.value)


def test_without_variables_a_process_is_alone():
    assert own_membership({}) == Membership()
    assert own_membership({"WORLD_SIZE": "1"}).alone
    assert Membership().alone


def test_torchrun():
    assert own_membership(TORCHRUN) == Membership(
        launcher="torchrun",
        rank=5,
        num_ranks=8,
        local_rank=1,
        local_num_ranks=4,
        node=1,
        master="node-a",
        port=29500,
    )


def test_one_process_of_torchrun_is_a_rank_all_the_same():
    who = own_membership(
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    )
    assert not who.alone
    assert who.one_machine


def test_our_launcher_needs_no_master():
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    started = {"FREESCALE_RENDEZVOUS": "file:///dev/fd/7", "FREESCALE_LAUNCHER_LINE": "6"}
    who = own_membership({**ranks, **started})
    assert (who.launcher, who.rank, who.master, who.one_machine) == ("freescale train", 1, None, True)
    assert "MASTER_ADDR is missing" in message(ranks)


def test_slurm():
    who = own_membership(SLURM)
    assert (who.launcher, who.rank, who.num_ranks) == ("Slurm", 3, 4)
    assert (who.local_rank, who.local_num_ranks, who.node, who.master) == (1, 2, 1, "node01")
    assert not who.one_machine


def test_tasks_of_one_slurm_step_find_one_port_and_other_steps_another():
    ports = {own_membership({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(4)}
    others = {
        own_membership({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": "1"}).port for job in ("17", "18")
    }
    assert len(ports) == 1
    assert len(ports | others) == 3
    assert all(15_000 <= port < 30_000 for port in ports | others)


def test_uneven_tasks_of_slurm():
    counts = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    last = own_membership({**SLURM, **counts, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
    assert (last.local_rank, last.local_num_ranks) == (0, 1)


@pytest.mark.parametrize("environment", [ONE_TASK, BATCH_SCRIPT], ids=["srun -n1", "a batch script"])
def test_a_process_beside_slurm_tasks_is_alone(environment):
    assert own_membership(environment).alone


def test_what_is_typed_into_a_terminal_of_srun_is_alone_and_what_srun_starts_there_is_not(monkeypatch):
    terminal = {**SLURM, "SLURM_PTY_PORT": "41689"}
    monkeypatch.setattr(module.os, "isatty", lambda _: True)
    assert own_membership(terminal).alone
    monkeypatch.setattr(module.os, "isatty", lambda _: False)
    assert own_membership(terminal).num_ranks == 4


def test_our_launcher_and_torchrun_win_inside_a_slurm_step():
    assert own_membership({**SLURM, **TORCHRUN}).rank == 5
    own = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "FREESCALE_RENDEZVOUS": "file:///x"}
    assert own_membership({**ONE_TASK, **own}).num_ranks == 4


def test_open_mpi():
    who = own_membership(OPEN_MPI)
    assert (who.launcher, who.rank, who.num_ranks, who.local_rank) == ("Open MPI", 1, 2, 1)
    assert who.master == "127.0.0.1"
    assert who.port == own_membership({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).port


def test_mpich_and_intel():
    who = own_membership(MPICH)
    assert (who.launcher, who.rank, who.num_ranks, who.local_rank) == ("MPI (PMI)", 1, 2, 1)
    assert (who.master, who.port) == ("127.0.0.1", DEFAULT_PORT)


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH])
def test_mpi_over_several_machines_needs_the_first(environment):
    wide = {name: value.replace("2", "4") if "SIZE" in name else value for name, value in environment.items()}
    wide |= {name: "2" for name in wide if "LOCAL_SIZE" in name}
    assert "MASTER_ADDR is missing" in message(wide)
    assert own_membership({**wide, "MASTER_ADDR": "node-a"}).master == "node-a"
    assert own_membership({**wide, "SLURM_JOB_NODELIST": "n[3-4]"}).master == "n3"


def test_mpirun_wins_inside_a_slurm_job_where_slurm_counts_its_helpers():
    assert own_membership({**SLURM, **OPEN_MPI, "SLURM_STEP_NUM_TASKS": "2"}).launcher == "Open MPI"


def test_srun_with_pmi2_says_the_local_rank_by_slurm():
    who = own_membership({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "17.0"})
    assert (who.launcher, who.local_rank, who.local_num_ranks, who.node, who.master) == (
        "MPI (PMI)",
        1,
        2,
        1,
        "node01",
    )


def test_an_mpi_of_one_process_is_alone():
    assert own_membership({"PMI_RANK": "0", "PMI_SIZE": "1"}).alone


def test_a_pod_of_an_indexed_job():
    who = own_membership(POD)
    assert (who.launcher, who.rank, who.num_ranks, who.local_rank, who.local_num_ranks) == (
        "Kubernetes",
        2,
        4,
        0,
        1,
    )
    assert (who.master, who.port) == ("train-0.train", DEFAULT_PORT)


def test_pods_without_a_number_of_ranks_are_runs_of_their_own():
    assert own_membership({"JOB_COMPLETION_INDEX": "2"}).alone


def test_variables_by_hand_take_the_local_rank_from_slurm_if_it_means_the_same_process():
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node01"}
    assert own_membership({**SLURM, **by_hand}).local_rank == 1
    assert own_membership({**SLURM, **by_hand, "RANK": "2"}).local_rank is None
    assert own_membership({**by_hand, "LOCAL_WORLD_SIZE": "2"}).local_rank == 1


def test_world_size_and_master_by_hand_go_with_slurms_rank():
    who = own_membership({**SLURM, "WORLD_SIZE": "4", "MASTER_ADDR": "ib0-node01", "MASTER_PORT": "1234"})
    assert (who.rank, who.master, who.port) == (3, "ib0-node01", 1234)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "4"}, "RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is missing"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is missing"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is missing"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS is missing"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is missing"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "MASTER_ADDR is missing"),
    ],
)
def test_half_set_variables_are_named(environment, missing):
    said = message(environment)
    assert missing in said
    assert "next:" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "8"}, "a rank that cannot be"),
        ({"RANK": "one"}, "RANK is no number"),
        ({"LOCAL_RANK": "4"}, "a local rank that cannot be"),
        ({"LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "0"}, "a number of ranks on this machine that cannot be"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is no number"),
    ],
)
def test_nonsense_is_refused(changes, said):
    assert said in message({**TORCHRUN, **changes})


def test_a_number_of_ranks_that_contradicts_the_launcher_is_refused():
    said = message({**SLURM, "WORLD_SIZE": "8"})
    assert "WORLD_SIZE and Slurm contradict each other" in said
    assert "WORLD_SIZE=8, Slurm started 4 processes" in said


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[01-04,07]", "node01"),
        ("node[07,01-04],login", "node07"),
        ("gpu3", "gpu3"),
        ("a,b,c", "a"),
        ("rack[1-2]n[08-09],x", "rack1n08"),
        ("ip-10-0-[3-4]-7", "ip-10-0-3-7"),
        ("n[1-2].cluster.example", "n1.cluster.example"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_an_empty_list_of_hosts_is_an_error():
    with pytest.raises(TrainingError, match="list of hosts is empty"):
        first_host("")


def test_the_tasks_of_each_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("") == []


def test_one_task_a_node_is_a_node_for_our_launcher():
    one_each = {
        **SLURM,
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    nodes, node, host, port = slurm_node(one_each)
    assert (nodes, node, host) == (2, 1, "node01")
    assert port == own_membership(one_each).port
    assert slurm_node(SLURM) is None
    assert slurm_node({}) is None


def test_what_is_known_is_put_under_the_names_of_torchrun():
    seen: dict[str, str] = {}
    publish_membership(own_membership(SLURM), seen)
    port = seen.pop("MASTER_PORT")
    assert seen == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
    }
    again = own_membership({**SLURM, **seen, "MASTER_PORT": port})
    assert (again.rank, again.local_rank, again.node) == (3, 1, 1)
    publish_membership(Membership(), nothing := {})
    assert nothing == {}
