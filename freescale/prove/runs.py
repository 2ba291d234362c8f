"""Short trainings on embedded data, for claims about training."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from freescale.comm.world import Ranks, whole_tensor
from freescale.recipe import build_run, build_source, load_config
from freescale.trace import account_of as account_of_steps
from freescale.trace import record_into
from freescale.train import Progress, run_tensors, take_steps

SMALL = (
    "synthetic.users=300",
    "synthetic.items=150",
    "synthetic.mean_length=12",
    "synthetic.max_length=80",
    "data.max_length=40",
    "data.global_batch=24",
    "model.dim=12",
    "model.layers=1",
    "model.dropout=0",
    "model.dtype=float64",
    "head.num_negatives=16",
    "embedding.replicate_below_mb=0",
)
"""In float64: what differs then is not rounding."""


_LONG_TAILED = (
    "synthetic.items=2000",
    "synthetic.sigma=1.2",
    "model.dropout=0",
    "run.log_every=10",
    "embedding.replicate_below_mb=0",
    "balance.refit_every=null",
    "pipeline.decide_every=null",
)
_SIZES = {
    "cpu": (
        "synthetic.users=600",
        "synthetic.mean_length=100",
        "synthetic.max_length=1000",
        "data.max_length=1000",
        "head.num_negatives=32",
        "model.dim=32",
        "model.layers=2",
    ),
    "cuda": (
        "synthetic.mean_length=1000",
        "synthetic.max_length=8192",
        "data.max_length=8192",
        "head.num_negatives=128",
        "model.dim=512",
        "model.heads=4",
        "model.layers=4",
        "model.dtype=bfloat16",
        "embedding.optimizer=rowwise_adagrad",
    ),
}
_SAMPLES_OF_A_CPU = 12
_BUSY_KNOWN_BY = 24
"""Steps after which accounts tell the work of a GPU from the gaps in it: by then some were seen kernel by kernel."""

SHARES = ("bubble", "straggler", "comm", "host")
"""Of a step."""


def long_tailed(ranks: Ranks) -> tuple[str, ...]:
    """A model and long-tailed lengths: without balance, one rank's step can be several times another's.

    On GPUs there is so much to compute that hosts keep ahead of them, or nothing but hosts would be seen; every rank
    must call this.
    """
    batch = samples_of(ranks) * ranks.num_ranks
    users = (f"synthetic.users={2 * batch}",) if ranks.device.type == "cuda" else ()
    return (*_LONG_TAILED, *_SIZES[ranks.device.type], *users, f"data.global_batch={batch}")


def samples_of(ranks: Ranks) -> int:
    """Samples of a rank: on GPUs one for each SM that the smallest of them has, of which a shared one has its part."""
    if ranks.device.type != "cuda":
        return _SAMPLES_OF_A_CPU
    sms = torch.cuda.get_device_properties(ranks.device).multi_processor_count
    return max(8, min(int(each) for each in ranks.gather(torch.tensor([sms]))))


class Length(NamedTuple):
    """Steps of a short training, and how many of them, the first ones, do not count."""

    steps: int
    warm: int


def length_of(ranks: Ranks, steps: int) -> Length:
    """So many steps, of which a quarter compiles kernels; on GPUs beside those whose gaps are not known yet."""
    if ranks.device.type != "cuda":
        return Length(steps, steps // 4)
    return Length(steps + _BUSY_KNOWN_BY, _BUSY_KNOWN_BY)


@dataclass
class Steps:
    """A sink that keeps what was said of each step."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def write(self, event: dict[str, Any]) -> None:
        """Keep it if it is a step."""
        if event["event"] == "step":
            self.events.append(event)

    def close(self) -> None:
        """Nothing is held back."""

    @property
    def losses(self) -> list[float]:
        """Of the global batches, step by step."""
        return [float(event["loss"]) for event in self.events]


@dataclass(frozen=True)
class Trained:
    """What a short training has left.

    Args:
        steps: what was said of them; known to rank 0.
        tensors: this rank's part of every tensor, or the whole ones where they were asked for, on the CPU.
    """

    steps: Steps
    tensors: dict[str, torch.Tensor]


def train_shortly(
    ranks: Ranks,
    keys: Sequence[str],
    *,
    whole: bool = False,
    before_step: Callable[[int], None] | None = None,
) -> Trained:
    """Train on these ranks; every one of them must call it.

    Args:
        ranks: who takes part.
        keys: of the recipe.
        whole: bring the parts of all ranks together.
        before_step: called with the number of each step that is about to be taken.
    """
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="freescale-prove-") as folder:
        config = load_config(None, [*keys, f"run.device={ranks.device.type}", f"run.out={folder}"])
        run = build_run(config, build_source(config), ranks, Progress([steps]))
        try:
            with run.open_schedule(0) as schedule:
                if before_step is not None:
                    _announce(run, before_step)
                take_steps(run, schedule)
                schedule.flush()
        finally:
            run.accounts.close()
            record_into(None)
        tensors = {
            name: _on_cpu(whole_tensor(value) if whole else value) for name, value in run_tensors(run).items()
        }
    return Trained(steps, tensors)


def account_of(steps: Steps, *, warm: int) -> dict[str, Any]:
    """Of the steps that count: their mean, and shares of their time; losses of all. Other ranks than 0 know nothing."""
    kept = steps.events[warm:]
    found = account_of_steps(kept)
    if found is None:
        return {"losses": steps.losses, "imbalance": 0.0, "step_ms": 0.0, **dict.fromkeys(SHARES, 0.0)}
    uneven = statistics.fmean(float(event["imbalance"]) for event in kept)
    shares = {"bubble": found.bubble, **{name: found.shares[name] for name in SHARES[1:]}}
    return {"losses": steps.losses, "imbalance": uneven, "step_ms": found.step_ms, **shares}


def _on_cpu(value: Any) -> torch.Tensor:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().cpu().clone()


def _announce(run: Any, before_step: Callable[[int], None]) -> None:
    step = run.train_step.run

    def announced(ready: Any, schedule: Any) -> Any:
        before_step(ready.plan.step)
        return step(ready, schedule)

    run.train_step.run = announced
