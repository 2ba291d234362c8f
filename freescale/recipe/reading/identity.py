"""Which run it is: what its recipe, its seed and its data make, wherever its folder lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from freescale.recipe.config import Config
from freescale.recipe.reading.load import free_keys


def run_identity(recipe: Mapping[str, Mapping[str, Any]], data: str) -> str:
    """A text that is the same for runs on one curve.

    Keys that may change within a run do not count, nor do those that are as their default: a key that came later did
    then what its default does now.

    Args:
        recipe: as a checkpoint keeps it.
        data: fingerprint of what it learns from, "" where a checkpoint does not say.
    """
    recipe, defaults, free = _plain(recipe), _plain(Config().as_dict()), free_keys()
    if recipe.get("optim", {}).get("schedule") == "cosine":
        free = free - {"run.steps", "run.epochs"}  # the learning rate depends on them
    fixed = {
        f"{section}.{key}": value
        for section, keys in recipe.items()
        for key, value in keys.items()
        if f"{section}.{key}" not in free
        and (key not in defaults.get(section, {}) or value != defaults[section][key])
    }
    said = json.dumps([fixed, data], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def _plain(values: Any) -> Any:
    """As JSON has it: a checkpoint has no tuples."""
    return json.loads(json.dumps(values))
