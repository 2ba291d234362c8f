"""A control program that behaves like nvidia-cuda-mps-control, or misbehaves in one of the ways seen in the field."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = f"""#!{sys.executable}
import os, signal, sys, time
mode = os.environ.get("FAKE_MPS", "")
pipes, logs = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
pid_file = os.path.join(pipes, "nvidia-cuda-mps-control.pid")
with open(os.environ["FAKE_MPS_STORY"], "a") as story:
    if sys.argv[1:] == ["-d"]:
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        told = [str(os.environ.get(name)) for name in names]
        story.write(" ".join(["start", *told, oct(os.stat(pipes).st_mode), pipes]) + "\\n")
        story.flush()
        if mode == "refuses":
            print("An instance of this daemon is already running")
            sys.exit(1)
        child = os.fork()
        if child:
            with open(pid_file, "w") as file:
                file.write(str(child))
            os._exit(0)
        os.setsid()
        if mode == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(120)  # with the pipes of its starter still open
        os._exit(0)
    command = sys.stdin.read().strip()
    if mode == "mute" and command != "quit":
        sys.exit(0)
    story.write(command + "\\n")
    if command == "quit":
        if mode != "stubborn":
            os.kill(int(open(pid_file).read()), signal.SIGTERM)
    else:
        print("100.0")
"""


def install(folder: Path, monkeypatch, mode: str = "") -> Path:
    """Put the program first on PATH; returns the file that tells what was asked of it."""
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(0o755)
    temporary = folder / "temporary"
    temporary.mkdir()
    story = folder / "story"
    story.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("FAKE_MPS", mode)
    monkeypatch.setenv("FAKE_MPS_STORY", str(story))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return story
