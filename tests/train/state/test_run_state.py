"""What a checkpoint keeps of the optimizer, before its first step and after."""

from __future__ import annotations

import pytest
import torch

from freescale.train.state.run_state import adam_state


@pytest.mark.parametrize(("fused", "place"), [(True, "meta"), (False, "cpu")])
def test_steps_are_counted_where_the_optimizer_wants_them(fused: bool, place: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3, device="meta"))
    state = adam_state(torch.optim.AdamW([param]), param, fused=fused)
    assert state["step"].device.type == place
    assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "meta"


@pytest.mark.parametrize("fused", [False, True])
def test_state_made_ahead_is_the_one_the_first_step_makes(fused: bool) -> None:
    def one_step(*, ahead: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        param = torch.nn.Parameter(torch.arange(4.0))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        if ahead:
            adam_state(optimizer, param, fused=fused)
        param.grad = torch.ones(4)
        optimizer.step()
        return param.detach(), adam_state(optimizer, param, fused=fused)

    (param, state), (wanted, wanted_state) = one_step(ahead=True), one_step(ahead=False)
    assert torch.equal(param, wanted)
    assert state.keys() == wanted_state.keys()
    for name, values in wanted_state.items():
        assert torch.equal(state[name], values)
        assert state[name].dtype == values.dtype
