"""`freescale prove`: claims of this library, tried on your own ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from freescale.app.arguments import COMMAND, Plugins, load_plugins, say, typed_command
from freescale.errors import ConfigError

_DEVICES = ("auto", "cpu", "cuda")


def prove(
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ranks to start here; by itself one a GPU, or two on the CPU.", min=1),
    ] = None,
    virtual_gpus: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share one GPU (CUDA MPS).", min=1)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute or two: shorter soaks and trainings.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM,...", help="Try these alone, or one case: CLAIM:CASE; --list names them."
        ),
    ] = None,
    list_claims: Annotated[bool, typer.Option("--list", help="Name the claims and stop.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path, typer.Option(help="Folder for proof.html and proof.json; all machines should share it.")
    ] = Path("proof"),
    json_output: Annotated[bool, typer.Option("--json", help="Print the JSON, too.")] = False,
    plugin: Plugins = None,
) -> None:
    """Try on your own ranks what this library claims: one curve, equal bits, every transport, failures, rates.

    Run it alone, or under torchrun, srun or mpirun on as many machines as you like. It writes a page and a JSON file
    without names of machines, users or folders, and ends with 0 if everything that was tried held.
    """
    if device not in _DEVICES:
        raise ConfigError("there is no such device", got=device, allowed=", ".join(_DEVICES))
    load_plugins(plugin)
    from freescale.prove import chosen

    if list_claims:
        for name, claim in chosen(()):
            say(f"{name}: {claim.title}")
        return
    wished = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    chosen(wished)  # a wrong name is told before ranks are started, which would each tell it
    if _started_ranks(nproc=nproc, virtual_gpus=virtual_gpus, device=device):
        _leave_as(out)
        return
    from freescale.prove import Wanted
    from freescale.prove import prove as try_claims

    wanted = Wanted(
        out=out,
        quick=quick,
        device=device,
        only=wished,
        plugins=tuple(plugin or ()),
        command=typed_command(),
    )
    proof = try_claims(wanted, say=say)
    if proof is None:
        return
    say(proof.summary)
    say(str(out / "proof.html"))
    if json_output:
        import json

        say(json.dumps(proof.as_json()))
    if proof.exit_code and "FREESCALE_LAUNCHER_LINE" not in os.environ:  # our launcher reads it in the file
        raise typer.Exit(proof.exit_code)


def _leave_as(out: Path) -> None:
    """End as the proof says that ranks started from here have written."""
    import json

    from freescale.prove import DATA

    found = json.loads((out / DATA).read_text(encoding="utf-8"))
    if found["not_proven"] or found["to_come"]:
        raise typer.Exit(1)


def _started_ranks(*, nproc: int | None, virtual_gpus: int | None, device: str) -> bool:
    """Start ranks on this machine and wait for them; False if this process is one of them."""
    from freescale.comm.world import check_request, launch, launched_by

    if launched_by() is not None:
        return False
    environment, command = {COMMAND: typed_command()}, sys.argv[1:]
    if virtual_gpus is None and nproc is None and device != "cpu":
        nproc, virtual_gpus = _ranks_here()
    if virtual_gpus is not None:
        from freescale.comm.world import virtual_gpus as share_gpu

        check_request(virtual_gpus, nproc=nproc or virtual_gpus, device=device)
        with share_gpu(virtual_gpus) as shared:
            Console(stderr=True).print(escape(shared.message), highlight=False, soft_wrap=True)
            launch(command, num_ranks=virtual_gpus, environment={**shared.environment, **environment})
    else:
        launch(command, num_ranks=nproc or 2, environment=environment)
    return True


def _ranks_here() -> tuple[int | None, int | None]:
    """Ranks, and ranks that share a GPU, where nobody says how many: one a GPU; one GPU is shared by two."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 1:
        return None, 2
    return (gpus or 2), None
