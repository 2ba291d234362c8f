"""Fresh processes for one case of a claim: every rank starts one beside itself, and sees how it ends.

The ranks that `freescale prove` was started on only supervise. So a transport that hangs, a rank that is killed and a
process that crashes are evidence, and the next claim begins on clean processes again. It works under any launcher,
because the processes find each other by RANK and MASTER_ADDR, which are set here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freescale.comm.world import (
    Membership,
    Ranks,
    as_rank,
    end_with_launcher,
    free_port,
    from_first,
    gather,
    in_words,
    join_ranks,
    thread_met,
)
from freescale.prove.claim import Report, Setting
from freescale.registry import find, load_plugin
from freescale.trace import stage

_PLAN = "FREESCALE_PROVE"
_TIMEOUT_S = 60.0
_LOOK_S = 5.0
_MOST_WORDS = 4000
_LEFT_BEHIND = ("FREESCALE_RENDEZVOUS", "FREESCALE_LAUNCHER_LINE", "FREESCALE_COMMAND")
"""Variables that belong to whoever supervises; torchrun's, too, would lead to its store and not to ours."""


def try_case(
    ranks: Ranks,
    who: Membership,
    claim: str,
    setting: Setting,
    *,
    limit_s: float,
    plugins: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Report]:
    """Let every rank's process try a case; what became of all of them. Every rank must call it."""
    port = from_first(free_port, ranks=ranks, what="find a free port")
    environment = {**_environment(who, port), **(variables or {})}
    mine = _run(environment, claim, setting, rank=ranks.rank, limit_s=limit_s, plugins=plugins)
    return gather(mine, group=ranks.control)


def _environment(who: Membership, port: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_BEHIND and not name.startswith("TORCHELASTIC_")
    }
    address = "127.0.0.1" if who.one_machine or who.master is None else who.master
    return {
        **kept,
        "RANK": str(who.rank),
        "WORLD_SIZE": str(who.num_ranks),
        "LOCAL_RANK": str(who.local_rank or 0),
        "LOCAL_WORLD_SIZE": str(who.local_num_ranks or 1),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _run(
    environment: Mapping[str, str],
    claim: str,
    setting: Setting,
    *,
    rank: int,
    limit_s: float,
    plugins: Sequence[str],
) -> Report:
    """One process to its end, or to the end of its time."""
    with tempfile.TemporaryDirectory(prefix="freescale-prove-") as folder:
        answer, said = Path(folder, "answer.json"), Path(folder, "said.txt")
        plan = {
            "claim": claim,
            "setting": {**asdict(setting), "out": str(setting.out)},
            "answer": str(answer),
            "plugins": list(plugins),
        }
        began, timed_out = time.monotonic(), False
        with open(said, "w") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", "freescale.prove.worlds"],
                env={**environment, _PLAN: json.dumps(plan)},
                stdout=words,
                stderr=words,
                preexec_fn=end_with_launcher if sys.platform == "linux" else None,
            )
            try:
                timed_out = not _ends(process, f"try {claim}", within_s=limit_s)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        found = json.loads(answer.read_text()) if answer.exists() else {}
        return Report(
            rank,
            found.get("evidence"),
            error=found.get("error") or _last_words(said.read_text(errors="replace")),
            exit_code=process.returncode,
            timed_out=timed_out,
            seconds=time.monotonic() - began,
        )


def _last_words(text: str) -> str:
    """Where the thread stood that a signal met, which Python may write before others; else the end of it."""
    return thread_met(text)[:_MOST_WORDS] or text[-_MOST_WORDS:]


def _ends(process: subprocess.Popen[bytes], what: str, *, within_s: float) -> bool:
    """Whether a process ends in time; entered again and again, since who waits for it does not stand still."""
    deadline = time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        with stage(what), contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(left, _LOOK_S))
            return True
    return False


def _child() -> None:
    """One rank of a fresh world: measure, and leave what was seen."""
    plan = json.loads(os.environ.pop(_PLAN))
    setting = Setting(**{**plan["setting"], "out": Path(plan["setting"]["out"])})
    if "" not in sys.path:
        sys.path.append("")
    for module in plan["plugins"]:
        load_plugin(module)
    claim = find("claim", plan["claim"]).make
    answer = Path(plan["answer"])
    try:
        with join_ranks(device=setting.device, timeout_s=getattr(claim, "patience_s", _TIMEOUT_S)) as ranks:
            evidence = claim.measure(ranks, setting)
            _write(answer, {"evidence": evidence})
    except Exception as error:
        if not answer.exists():
            _write(answer, {"error": in_words(error)})
        raise


def _write(path: Path, what: dict[str, Any]) -> None:
    """Whole or not there: the process may be ended at any moment."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(what))
    os.replace(aside, path)


if __name__ == "__main__":
    as_rank(_child)
