"""A command that does what `python` does without importing torch again: most of what a short command takes.

A process forked from the tests, where everything is imported, waits at a socket. The command sends it arguments,
folder, environment, its own standard streams, and later SIGTERM; a fork of that process then runs `-m MODULE`,
`-c CODE` or a file, and all that it starts by `sys.executable` comes the same way. Started on one of the machines of
`tests/nodes.py`, the command runs there. Imports in a fresh process are what it cannot show.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
names = ["FREESCALE_LAUNCHER_LINE", "FREESCALE_RENDEZVOUS"]
given = {{name: int(os.environ[name].rpartition("/")[2]) for name in names if name in os.environ}}
socket.send_fds(line, [b"\\n"], [0, 1, 2, *given.values()])
line.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), list(given)]).encode() + b"\\n")
signal.signal(signal.SIGTERM, lambda *_: line.sendall(b"T"))
status = int(line.recv(16) or b"1")
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def warm_python() -> Iterator[Path]:
    """The command's path; inside the block it can be run, by any number of processes at a time."""
    # A name of its own: addresses of sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command, address = Path(folder, "python"), f"{folder}/line"
        command.write_text(CLIENT.format(python=sys.executable, address=address))
        command.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(16)
            server = os.fork()
            if server == 0:
                _serve(door, command)
        try:
            yield command
        finally:
            os.killpg(server, signal.SIGKILL)
            os.waitpid(server, 0)


def _serve(door: socket.socket, command: Path) -> NoReturn:
    try:
        os.setpgid(0, 0)  # ended as a whole, with all that is still running
        atexit._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for commands leave nothing behind
        import tests.ranks  # noqa: F401  what every training imports

        sys.executable = str(command)
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _answer(line)
            line.close()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _answer(line: socket.socket) -> NoReturn:
    """Run the command in a process of its own; killed when whoever asked is gone."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, (*streams,), _, _ = socket.recv_fds(line, 1, 5)
        with line.makefile("rb") as text:
            arguments, folder, environment, given = json.loads(text.readline())
        streams, others = streams[:3], dict(zip(given, streams[3:], strict=True))
        for name, number in others.items():  # what a launcher hands on has other numbers here
            environment[name] = f"{environment[name].rpartition('/')[0]}/{number}".lstrip("/")
        child = os.fork()
        if child == 0:
            _enter_machine_of(line)
            line.close()
            become(streams, folder, environment)
            run_as_python(arguments)
        for stream in (*streams, *others.values()):
            os.close(stream)
        ended, status = 0, 0
        while not ended:
            heard, _, _ = select.select([line], [], [], 0.01)
            asked = line.recv(1) if heard else b""
            gone = heard and not asked
            if heard:
                os.kill(child, signal.SIGTERM if asked else signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if gone else os.WNOHANG)
        if not gone:
            line.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


def _enter_machine_of(line: socket.socket) -> None:
    """Go where whoever asks is: to its network, name and mounts."""
    pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc", "mnt"):
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            with open(f"/proc/{pid}/ns/{kind}") as there:
                if libc.setns(there.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {pid}")


def become(streams: list[int], folder: str, environment: dict[str, str]) -> None:
    """Take the standard streams, the folder and the environment of a command."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    faulthandler.disable()  # pytest's, which writes to a copy of pytest's own stderr
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        opened = open(number, "w", closefd=False, buffering=1)  # noqa: SIM115
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def run_as_python(arguments: list[str]) -> NoReturn:
    """Do what `python` does with these arguments, and end this process as it would."""
    status = 1
    try:
        _execute([each for each in arguments if each != "-u"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _execute(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")
