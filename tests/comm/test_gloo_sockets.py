"""Groups of gloo: nobody connects once they are open, and who connected before in the place of a rank is cut off."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
import traceback

import pytest
import torch
import torch.distributed as dist

from freescale.comm import gloo_sockets
from freescale.comm.gloo_sockets import open_privately
from freescale.errors import TrainingError
from tests.other_user import OTHER, only_root
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timed


def open_group() -> object:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=5))


def doors(pid: int | str = "self") -> dict[str, tuple[str, int]]:
    """Where a process listens, by inode."""
    held = set()
    for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(f"/proc/{pid}/fd/{file}")[8:-1])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {row[9]: gloo_sockets._read(row[1]) for row in rows if row[3] == "0A" and row[9] in held}


def knock(rank: int) -> list[str]:
    """What happens to a caller, at every door of a group that was opened with and without care."""
    said = []
    for opened in (lambda: open_privately(open_group), open_group):
        before = doors()
        group = opened()
        dist.barrier()
        for inode, address in doors().items():
            if inode not in before:
                with socket.socket() as caller:
                    caller.settimeout(0.3)
                    said.append(caller.connect_ex(address))
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2, 2, 2]
    return ["open" if each == 0 else "shut" for each in said]


def test_an_open_group_takes_no_more_connections():
    assert run_on_ranks(knock, 2) == [["shut", "open"]] * 2


def intrude(words: list[bytes]) -> int:
    """In a process of its own: call the next door of this one as another user, and stay."""
    before, pid = doors(), os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        deadline = time.monotonic() + 10
        while not (new := [address for inode, address in doors(pid).items() if inode not in before]):
            assert time.monotonic() < deadline
        os.setgid(OTHER)
        os.setuid(OTHER)
        callers = [socket.create_connection(new[0], timeout=5) for _ in words]
        for caller, each in zip(callers, words, strict=True):
            caller.sendall(each)
        code = 0
        time.sleep(2)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def open_under_attack(rank: int, words: list[bytes]) -> str:
    intruder = intrude(words)
    time.sleep(1.0 * rank)  # the door of the first rank stands open until the other comes
    began = time.monotonic()
    try:
        group = open_privately(open_group)
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        said = f"sum {values[0]:.0f}"
    except TrainingError as error:
        said = str(error)
    except RuntimeError:
        said = "the other has failed"
    assert time.monotonic() - began < 40  # gloo connects five times, for 5 s each
    _, status = os.waitpid(intruder, 0)
    assert status == 0 or rank == 1, "the first rank waits for the second, so its door can be found"
    return said


@only_root
def test_a_silent_or_noisy_stranger_does_not_matter():
    assert run_on_ranks(open_under_attack, 2, [b"", b"x" * 8, b"y" * 100]) == ["sum 2"] * 2


@only_root
def test_a_stranger_in_the_place_of_a_rank_is_cut_off_and_named():
    """gloo believes whoever says a small number first; which rank is called and which calls is a matter of ports."""
    numbers = [number.to_bytes(8, "little") for number in range(4)]
    for _ in range(10):
        said = run_on_ranks(open_under_attack, 2, numbers)
        if said != ["sum 2"] * 2:
            break
    told = [each for each in said if "in the place of a rank" in each]
    assert told, said
    assert f"user {OTHER}; the connection was cut before anything was sent" in told[0]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("0000000000000000FFFF00000100007F:0016", ("127.0.0.1", 22)),
        ("00000000000000000000000001000000:0050", ("::1", 80)),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(text, end, monkeypatch):
    monkeypatch.setattr(gloo_sockets.sys, "byteorder", "little")
    assert gloo_sockets._read(text) == end
