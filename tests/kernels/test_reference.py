"""What a subject's door offers to compute, its reference says in plain words, under the same name."""

from __future__ import annotations

import importlib
import inspect

import pytest

# Questions about the machine, flags and numbers: no computation.
ASKED = {"can_fuse_layer", "can_fuse_stu", "update_reason", "NO_ROW", "no_bad_row", "step_numbers", "GOLDEN"}
# What has its truth under another name: a plan however it is made; ids made unique; an update, which the `move` of each
# optimizer says in plain words (tests/kernels/rows/test_fused.py holds it against that).
TOLD_ELSEWHERE = {
    "plan_keys": "row_plan",
    "plan_again": "row_plan",
    "plan_of_unique": "row_plan",
    "unique_of": "unique",
    "update_rows": "sum_planned",
    "update_keys": "sum_planned",
}


@pytest.mark.parametrize("subject", ["rows", "hstu"])
def test_every_function_at_the_door_has_its_reference(subject):
    pytest.importorskip("triton")
    door = importlib.import_module(f"freescale.kernels.{subject}")
    truth = importlib.import_module(f"freescale.kernels.{subject}.reference")
    offered = {name for name in door.__all__ if not inspect.isclass(getattr(door, name))} - ASKED
    assert offered
    assert sorted(name for name in offered if not hasattr(truth, TOLD_ELSEWHERE.get(name, name))) == []
