"""Which checkpoints a run may go on from, and whether they are of the same recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freescale.data import OnChange
from freescale.errors import CheckpointError, ConfigError
from freescale.recipe import Config, free_keys, load_config
from freescale.train import read_meta, saved_in


def find_checkpoints(out: Path, resume: str) -> list[Path]:
    """Checkpoints to start from, the one to prefer first: all of a run, or the one named; none for a fresh start."""
    if resume == "never":
        return []
    if resume == "auto":
        return saved_in(out / "checkpoints")[::-1]
    path = Path(resume)
    found = [path] if path in saved_in(path.parent) else saved_in(path / "checkpoints")[::-1]
    if not found:
        raise CheckpointError(
            "there is no checkpoint to resume from",
            got=path,
            allowed="auto, never, RUN_DIR or RUN_DIR/checkpoints/step-N",
        )
    return found


def on_change_of_data(out: Path, resume: str, *, new_data: bool) -> OnChange:
    """What a run does where data.path is a raw file, and its folder has another one prepared.

    Who starts over, goes on with new data or has nothing to go on from takes the new one; a run that goes on does not.
    """
    goes_on = resume != "never" and not new_data and bool(saved_in(out / "checkpoints"))
    return "refuse" if goes_on else "renew"


def checkpoints_for(out: Path, how: str, config: Config) -> list[Path]:
    """Checkpoints to start from.

    A run that starts from another one's needs a folder of its own, or it would write over what is there; started again,
    it goes on with what it has written since.
    """
    paths, folder = find_checkpoints(out, how), out / "checkpoints"
    if not paths or paths[0].parent.resolve() == folder.resolve():
        return paths
    saved, recipe = saved_in(folder)[::-1], out / "config.yaml"
    if any(_began_from(path, Path(how)) for path in saved):
        return saved
    if saved:
        raise CheckpointError(
            f"{out} holds another run than the one to resume from",
            got=f"--resume {how}, and {len(saved)} checkpoints up to {saved[0].name} in run.out",
            next_step="choose another run.out, go on with the run there (--resume auto), or remove it (--resume never)",
        )
    if recipe.exists():
        check_same_recipe(folder / paths[0].name, load_config(recipe).as_dict(), config)
    return paths


def _began_from(checkpoint: Path, other: Path) -> bool:
    """Whether the run of this checkpoint started from the other checkpoint, or from one of that run."""
    try:
        origin = read_meta(checkpoint).get("begun_from")
    except CheckpointError:
        return False
    return origin is not None and other.resolve() in (Path(origin), Path(origin).parent.parent)


def check_same_recipe(path: Path, saved: Mapping[str, Any], config: Config) -> None:
    """A run goes on with the recipe it was started with, or it would leave its curve."""
    # A key that came later did then what its default does now.
    defaults = Config().as_dict()
    # The length of the run is part of the curve when the learning rate depends on it.
    free = free_keys() - ({"run.steps", "run.epochs"} if config.optim.schedule == "cosine" else set())
    different = [
        f"{section}.{key}: {then!r} there, {value!r} now"
        for section, keys in config.as_dict().items()
        # Of sections whose keys are made up, such as features, one may be gone, too.
        for key in {**keys, **({} if defaults[section] else saved.get(section, {}))}
        for value in [keys.get(key)]
        for then in [_plain(saved.get(section, {}).get(key, defaults[section].get(key)))]
        if f"{section}.{key}" not in free and _plain(value) != then
    ]
    if different:
        there = path.parent.parent
        own = there.resolve() == Path(config.run.out).resolve()
        raise ConfigError(
            f"{there} holds a run with another recipe:\n  - " + "\n  - ".join(different),
            next_step="choose another run.out, or start over in this one with --resume never"
            if own
            else f"leave these keys as they are in {there / 'config.yaml'}, or begin a run of its own without --resume",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
