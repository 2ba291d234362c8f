"""Which assumption moves the answer most: every number halved and doubled (or in its own range), one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freescale.sim.answers.keys import OF_ONE_TABLE, changed, value_of
from freescale.sim.answers.whatif import Prediction, predict
from freescale.sim.costs.setting import Features, Setting

KEYS = (
    "setting.jitter",
    "setting.cost_error",
    "cluster.nic_gb_per_s",
    "cluster.nvlink_gb_per_s",
    "cluster.latency_us",
    "cluster.node_latency_us",
    "cluster.per_peer_us",
    "cluster.half_message_kb",
    "cluster.gloo_message_us",
    "cluster.inside_message_us",
    "cluster.ids_exchange_us",
    "cluster.sum_hop_us",
    "cluster.sm_kernel_slowdown",
    "workload.samples_per_gpu",
    "workload.table_rows",
    "workload.zipf",
    "workload.row_bytes",
    "workload.ids_per_token",
    "workload.dense_bytes",
    "workload.bucket_bytes",
)


@dataclass(frozen=True)
class Influence:
    """What one assumption does to the prediction.

    Args:
        key: its name.
        low: the smaller value tried.
        high: the larger one.
        low_lost: lost share of the step with the smaller value.
        high_lost: with the larger one.
        low_tokens: tokens/s with the smaller value, times those of the prediction.
        high_tokens: with the larger one.
        source: where the value in use comes from.
    """

    key: str
    low: float
    high: float
    low_lost: float
    high_lost: float
    low_tokens: float
    high_tokens: float
    source: str

    @property
    def swing(self) -> float:
        """Lost share between the two, in parts of a step."""
        return abs(self.high_lost - self.low_lost)


def influences(
    setting: Setting,
    features: Features,
    *,
    num_ranks: int,
    keys: Sequence[str] = KEYS,
    num_steps: int = 48,
) -> list[Influence]:
    """Every key's influence, the largest first."""
    plans = 12 if num_ranks <= 512 else 6

    def run(changed_setting: Setting, changed_features: Features) -> Prediction:
        return predict(
            changed_setting,
            changed_features,
            num_ranks=num_ranks,
            num_steps=num_steps,
            plan_steps=plans,
            alone=1.0,
        )

    middle = run(setting, features)
    found = []
    if setting.workload.tables:
        keys = [key for key in keys if key.removeprefix("workload.") not in OF_ONE_TABLE]
    for key in keys:
        low, high = _range(key, float(value_of(setting, features, key)))
        ends = [run(*changed(setting, features, key, value)) for value in (low, high)]
        found.append(
            Influence(
                key=key,
                low=low,
                high=high,
                low_lost=ends[0].lost,
                high_lost=ends[1].lost,
                low_tokens=ends[0].tokens_per_s / middle.tokens_per_s,
                high_tokens=ends[1].tokens_per_s / middle.tokens_per_s,
                source=source_of(setting, key),
            )
        )
    return sorted(found, key=lambda one: -one.swing)


def source_of(setting: Setting, key: str) -> str:
    """Where a number comes from: a citation, a measurement, or an assumption."""
    section, _, name = key.partition(".")
    if section == "cluster":
        return setting.cluster.sources.get(name, "given")
    if key in ("setting.jitter", "setting.cost_error"):
        name = {"setting.jitter": "jitter", "setting.cost_error": "rates.cost_error"}[key]
        given = setting.jitter if key == "setting.jitter" else setting.cost_error
        measured = name in setting.profile.measured and given is None
        return f"profile of {setting.profile.hardware}" if measured else "assumption"
    return "the workload asked about"


def _range(key: str, value: float) -> tuple[float, float]:
    if key in ("setting.jitter", "setting.cost_error"):
        return 0.0, max(2 * value, 0.01)
    if key == "workload.zipf":
        return max(0.0, value - 0.2), min(4.0, value + 0.2)
    if key.endswith("slowdown"):
        return 1.0, 1 + 2 * max(value - 1, 0.05)
    whole = key in ("workload.samples_per_gpu", "workload.table_rows", "workload.row_bytes")
    return (max(1.0, float(int(value / 2))) if whole else value / 2), 2 * value
