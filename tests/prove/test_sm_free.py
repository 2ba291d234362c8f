"""Who holds the SMs while a transport is tried without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from freescale.comm.world import Ranks, facts
from freescale.prove.claims.sm_free import holds_its_gpu
from tests.ranks import run_on_ranks


def holds(rank: int, gpus: list[str]) -> bool:
    own_facts = facts.own_facts
    facts.own_facts = lambda device: replace(own_facts(device), gpu=gpus[rank])
    return holds_its_gpu(Ranks(rank, len(gpus), torch.device("cpu"), group=dist.group.WORLD))


@pytest.mark.parametrize(("gpus", "wanted"), [(["a", "a"], [True, False]), (["a", "b"], [True, True])])
def test_the_first_rank_holds_what_all_share_and_takes_part_when_they_find_out(gpus, wanted):
    """The first one knew its answer without the others, and they waited for it until their time was over."""
    assert run_on_ranks(holds, 2, gpus, timeout=30.0) == wanted
