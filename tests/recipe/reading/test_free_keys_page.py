"""docs/checkpoints.md names every key that may change where a run goes on, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from freescale.recipe import free_keys

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def test_the_page_lists_the_keys_that_may_change() -> None:
    listed = (
        PAGE.read_text().split("Keys that cannot move the curve may change:")[1].split("Any other change")[0]
    )
    named = set(re.findall(r"`([a-z]+\.[a-z_*]+)`", listed))
    whole = {name.removesuffix(".*") for name in named if name.endswith(".*")}
    single = {key for key in free_keys() if key.split(".")[0] not in whole}
    assert single == {name for name in named if not name.endswith(".*") and name.split(".")[0] not in whole}
    fixed = {"run.seed", "balance.window"}
    assert fixed.isdisjoint(free_keys())
    assert fixed <= named
