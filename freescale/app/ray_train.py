"""Train on the workers of Ray Train: `TorchTrainer(train_loop, train_loop_config={"arguments": [...]})`.

Ray starts one worker a rank, gives it RANK and the rest, and starts all of them again after a failure; the run then
goes on from its last checkpoint in run.out. docs/clusters.md has the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from freescale.app.arguments import load_plugins, split_arguments
from freescale.app.run.train_run import train_run
from freescale.comm.world import free_port
from freescale.errors import ConfigError, nearest
from freescale.recipe import Config, load_config
from freescale.train import TerminalSink

_OPTIONS = ("arguments", "resume", "plugins")


def train_loop(options: Mapping[str, Any]) -> dict[str, Any]:
    """What every worker runs; returns the summary of the run, which is `return_value` of Ray's result.

    Args:
        options: `arguments`, what would follow `freescale train` (a recipe, KEY=VALUE ...); `resume` and `plugins`, as
            --resume and --plugin.
    """
    _check(options)
    load_plugins(list(options.get("plugins", ())))
    recipe, overrides = split_arguments(list(options.get("arguments", ())))
    config = load_config(recipe, overrides)
    _check_folder(config)
    _make_room_for_own_group()
    return train_run(
        config,
        resume=options.get("resume", "auto"),
        open_terminal=lambda total: TerminalSink(total_steps=total, log_every=config.run.log_every),
    )


def _check(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            near = nearest(name, _OPTIONS)
            raise ConfigError(
                f"train_loop_config has an option train_loop does not know: {name}",
                allowed=", ".join(_OPTIONS),
                next_step=f"did you mean {near}?" if near else None,
            )


def _check_folder(config: Config) -> None:
    """Ray's workers start in folders of their own, so a relative path names another place for each."""
    if not Path(config.run.out).is_absolute():
        raise ConfigError(
            "run.out must be an absolute path under Ray, in a folder that all workers share",
            got=f"run.out={config.run.out}",
            next_step="add run.out=/a/shared/folder to the arguments",
        )


def _make_room_for_own_group() -> None:
    """Ray has opened a process group and its store. Ours has other backends and limits and needs a port of its own."""
    if not dist.is_initialized():
        return
    port = [free_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
