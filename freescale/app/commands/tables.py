"""Commands about tables of other libraries: import; `export --to` stands with export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freescale.app.arguments import pairs, say
from freescale.errors import ConfigError


def import_tables(
    origin: Annotated[str, typer.Argument(metavar="FROM", help="What wrote the checkpoint: torchrec.")],
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder that torch.distributed.checkpoint wrote, on any number of ranks.")
    ],
    out_dir: Annotated[Path, typer.Argument(help="New folder, for embedding.start_from.")],
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WEIGHT",
            help="A table and the name of its weight there; all tables of collections unless given.",
        ),
    ] = None,
    without_state: Annotated[
        bool, typer.Option("--without-state", help="Leave the sums of row-wise Adagrad out.")
    ] = False,
) -> None:
    """Take tables over from a TorchRec checkpoint: rows, sums of row-wise Adagrad, zero-collision identities."""
    if origin != "torchrec":
        raise ConfigError("tables can be imported from TorchRec only", got=origin, allowed="torchrec")
    from freescale.app.run.torchrec_tables import import_torchrec

    for line in import_torchrec(
        checkpoint, out_dir, tables=pairs(table, option="--table"), state=not without_state
    ):
        say(line)
    say(f"start from them: freescale train embedding.start_from={out_dir} ...")
