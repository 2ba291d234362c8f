"""SharedExperts: towers of tasks over experts that all tasks share, each task mixing them by a gate of its own.

experts    e_1(x), ..., e_n(x)                   one hidden layer each, shared by all tasks
task t     tower_t(sum of softmax(G_t x)_i e_i(x))

Tasks that disagree can take other experts, tasks with few labels learn from those of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedExperts(nn.Module):
    """[K, inputs] -> [K, tasks].

    Args:
        inputs: width of what is known of a candidate.
        dim: width of an expert.
        tasks: how many.
        experts: how many.
    """

    def __init__(self, inputs: int, *, dim: int, tasks: int, experts: int) -> None:
        super().__init__()
        self.num_tasks, self.num_experts = tasks, experts
        self.experts = nn.Linear(inputs, experts * dim)
        self.gates = nn.Linear(inputs, tasks * experts)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1)) for _ in range(tasks)
        )

    def forward(self, x_KI: Tensor) -> Tensor:
        """One number a task."""
        made = nn.functional.silu(self.experts(x_KI)).unflatten(-1, (self.num_experts, -1))
        shares = self.gates(x_KI).unflatten(-1, (self.num_tasks, self.num_experts)).softmax(-1)
        mixed = shares @ made  # [K, tasks, dim]
        return torch.cat([tower(mixed[:, n]) for n, tower in enumerate(self.towers)], dim=-1)
