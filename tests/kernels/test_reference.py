"""What a subject's door offers to compute, its reference says in plain words, under the same name."""

from __future__ import annotations

import importlib
import inspect

import pytest

# A question about the machine, no computation.
ASKED = {"can_fuse_layer"}


@pytest.mark.parametrize("subject", ["rows", "hstu"])
def test_every_function_at_the_door_has_its_reference(subject):
    pytest.importorskip("triton")
    door = importlib.import_module(f"freescale.kernels.{subject}")
    truth = importlib.import_module(f"freescale.kernels.{subject}.reference")
    offered = {name for name in door.__all__ if not inspect.isclass(getattr(door, name))} - ASKED
    assert offered
    assert sorted(name for name in offered if not hasattr(truth, name)) == []
