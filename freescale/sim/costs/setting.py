"""What a prediction rests on: which ideas are on, and the workload, profile and cluster they meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freescale.balance import CostModel, FloatArray
from freescale.sim.inputs.cluster import Cluster
from freescale.sim.inputs.profile import WEIGHTS, Profile, cost_model_of
from freescale.sim.inputs.workload import Workload

# Of an HSTU training step on an H200, attention and matrix products take about half; the rest waits for memory.
MEMORY_BOUND = 0.5


@dataclass(frozen=True)
class Features:
    """Which of the ideas are on.

    Args:
        balancer: "random" deals samples out in turn, "kk_equal" is Karmarkar-Karp with equal counts, "freescale".
        prioritized: rows and gradients that have time travel under compute.
        dedup: every distinct row travels once; off: every occurrence.
        sm_free: embedding exchanges hold no SM, where such a transport has run. Dense gradients are summed by kernels
            either way.
        even_owners: the most popular rows are dealt evenly to their owners, not as hashing does.
        postpone: weight gradients are computed while shared rows travel; only where traffic is hidden.
        node_dedup: every distinct row of a node travels between nodes once, not once for each rank that wants it.
        window: steps planned together.
        token_cap: most tokens of a rank, in means.
    """

    balancer: str = "freescale"
    prioritized: bool = True
    dedup: bool = True
    sm_free: bool = True
    even_owners: bool = False
    postpone: bool = False
    node_dedup: bool = False
    window: int = 1
    token_cap: float | None = 1.10

    @property
    def splits(self) -> bool:
        """Whether the backward is split: there must be traffic beside which weight gradients are computed."""
        return self.postpone and self.prioritized

    def words(self) -> str:
        """What is on."""
        parts = [] if self.balancer == "random" else [{"kk_equal": "KK-equal"}.get(self.balancer, "balance")]
        parts += ["prioritized"] if self.prioritized else []
        parts += ["dedup"] if self.dedup else []
        parts += ["SM-free"] if self.sm_free else []
        parts += ["even owners"] if self.even_owners else []
        parts += ["postpone"] if self.postpone else []
        parts += ["node dedup"] if self.node_dedup else []
        parts += [f"window {self.window}"] if self.window > 1 else []
        return " + ".join(parts) or "all off"


@dataclass(frozen=True)
class Setting:
    """Everything a prediction rests on but the features and the number of ranks.

    Args:
        workload: what is trained.
        profile: the measured device.
        cluster: what it stands in.
        seed: of lengths, jitter and hashing.
        speed_spread: relative spread of the speeds of ranks, for good.
        slow_ranks: speeds of the last ranks.
        jitter: spread of one shape from step to step; the profile's unless given.
        cost_error: how far a batch is off what the balancer expects of it; the profile's unless given.
        weights_share: share of the backward that can be postponed, assumed where the profile has not timed it.
        profiled_on: the cluster of the profiled device, where it is known.
    """

    workload: Workload
    profile: Profile
    cluster: Cluster
    seed: int = 0
    speed_spread: float = 0.0
    slow_ranks: tuple[float, ...] = ()
    jitter: float | None = None
    cost_error: float | None = None
    weights_share: float = 0.0
    profiled_on: Cluster | None = None

    @property
    def rank_word(self) -> str:
        """What a rank computes on, for people."""
        return "rank" if self.profile.device == "cpu" else "GPU"

    def ranks_in_words(self, count: int) -> str:
        """`1 GPU`, `256 GPUs`, or `4 ranks` where a CPU was profiled."""
        return f"{count:,} {self.rank_word}{'' if count == 1 else 's'}"

    def cost_model(self) -> CostModel:
        """What the balancer plans with: the profile's forward and backward."""
        return cost_model_of(self.profile.times)

    def scale(self) -> float:
        """Compute time on this cluster's GPU, times that on the profiled one: by peak and by memory rate."""
        if self.profiled_on is None:
            return 1.0
        by_peak = self.profiled_on.peak_tflops / self.cluster.peak_tflops
        by_memory = self.profiled_on.memory_tb_per_s / self.cluster.memory_tb_per_s
        return (1 - MEMORY_BOUND) * by_peak + MEMORY_BOUND * by_memory

    def speeds(self, num_ranks: int) -> FloatArray:
        """[ranks] persistent speeds: `speed_spread` as relative deviation, the last ranks as slow as given."""
        rng = np.random.default_rng([self.seed, 5])
        speeds = np.maximum(1 + self.speed_spread * rng.standard_normal(num_ranks), 0.2)
        for place, speed in enumerate(self.slow_ranks[:num_ranks]):
            speeds[-1 - place] = speed
        return speeds

    def noise(self, shape: tuple[int, int]) -> FloatArray:
        """Every rank and step a little faster or slower than planned, and never less than a fifth.

        A step of one shape varies (jitter), and the balancer's cost model is off by something in every batch.
        """
        spread = float(np.hypot(self.jitter_now, self.cost_error_now))
        if spread == 0:
            return np.ones(shape)
        rng = np.random.default_rng([self.seed, 9])
        return np.maximum(1 + spread * rng.standard_normal(shape), 0.2)

    @property
    def jitter_now(self) -> float:
        """What is given, or what the profile has measured."""
        return self.profile.jitter if self.jitter is None else self.jitter

    @property
    def cost_error_now(self) -> float:
        """The same of the error of costs; a profile without it has it in its jitter."""
        return self.profile.rates.get("cost_error", 0.0) if self.cost_error is None else self.cost_error

    @property
    def knows_weights(self) -> bool:
        """Whether it is known, or assumed, how long weight gradients take."""
        return WEIGHTS in self.profile.times or self.weights_share > 0

    def is_sm_free(self, features: Features, num_ranks: int) -> bool:
        """Whether exchanges hold no SM while they last.

        Copy engines do so in a node, and between nodes nothing that has run. Ranks that share a GPU have short copies,
        which are kernels, in their place.
        """
        if self.profile.device == "cpu":
            return False
        in_a_node = num_ranks <= self.cluster.gpus_per_node or self.profile.shared_by > 1
        return features.sm_free and (in_a_node or self.cluster.sm_free_network > 0)
