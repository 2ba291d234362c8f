"""How the stages of a batch overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import key

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from freescale.comm.traffic import Channels
    from freescale.comm.world import Ranks
    from freescale.embedding import ShardedEmbedding
    from freescale.pipeline import LoadedBatches, Padder, ParcelLoader, PostponeShare, Schedule, Switch
    from freescale.recipe.building.run_parts import Learner, Samples, Stages
    from freescale.recipe.building.run_tables import RunTables
    from freescale.recipe.config import Config
    from freescale.train import Progress, StopRequest


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How the stages of a batch overlap."""

    prioritized: bool = key(
        True, "hide embedding traffic under compute on more than one rank; false: the plain path", free=True
    )
    ahead: bool | None = key(
        None,
        "on one rank a thread loads batches and finds their rows while others compute; null: on a GPU",
        free=True,
    )
    decide_every: int | None = key(
        100,
        "steps before the first trial of the other way; trials follow at 2, 4, 8, ... times it, from 64 times on at "
        "every 64; null: no trials",
        at_least=1,
        free=True,
    )
    chunk_mb: float = key(
        1.0,
        "hidden traffic travels in pieces of this size, so that urgent traffic passes",
        at_least=0.001,
        free=True,
    )
    postpone: Literal["auto", "on", "off"] = key(
        "off",
        "compute gradients of weights while overlapped rows travel; auto: as many of them as make steps fastest",
        free=True,
    )
    postpone_mb: float | None = key(
        None,
        "memory that inputs and gradients kept for postponed weight gradients may take, each at most half of it; "
        "the rest is not postponed; null: a quarter of what a GPU has left when training begins (a CPU: 2048)",
        at_least=0,
        free=True,
    )
    check: bool = key(
        False,
        "prove in every step that no row is read before its last update (slow, for debugging)",
        free=True,
    )


def problems(config: Config) -> list[str]:
    """Every mistake in these keys shows in one key alone."""
    return []


def hides_traffic(config: Config, embedding: ShardedEmbedding, ranks: Ranks) -> bool:
    """Whether there is embedding traffic to hide: several ranks, and a table that is spread over them."""
    sharded = any(not plan.replicated for plan in embedding.plans.values())
    return config.pipeline.prioritized and ranks.num_ranks > 1 and sharded


def postpone_bytes(
    config: Config,
    embedding: ShardedEmbedding,
    ranks: Ranks,
    progress: Progress,
    *,
    captured: bool,
    calls_layers: bool = True,
) -> int | None:
    """What postponed weight gradients may keep; None: they come in the plain order, for a reason that is told.

    `captured`: steps are replayed. `calls_layers`: what the encoder says of its forward (`model/encoder.py`).
    """
    if config.pipeline.postpone == "off":
        return None
    reason = None
    if not hides_traffic(config, embedding, ranks):
        reason = "no embedding traffic is hidden that they could be computed under"
    elif captured and config.pipeline.postpone == "auto":
        reason = (
            "steps are replayed as CUDA graphs, of one order; pipeline.postpone=on postpones everything, and with "
            "run.capture=off steps try out how much"
        )
    elif captured and config.optim.accumulate > 1:
        reason = "micro-batches are replayed as CUDA graphs; with run.capture=off the last one leaves them"
    if reason is None:
        if config.optim.clip_norm is not None:
            progress.notice(
                0,
                "weights are updated at the end of a step, not beside the next forward: optim.clip_norm needs the "
                "norm of all gradients",
            )
        elif not calls_layers:
            progress.notice(
                0,
                f"all weights are updated before the next forward begins, not layer by layer in it: the encoder "
                f"{config.model.kind} does not say `calls_layers`",
            )
        return room_to_postpone(config, ranks.device)
    progress.notice(0, f"weight gradients in the plain order, not postponed: {reason}")
    return None


def room_to_postpone(config: Config, device: torch.device) -> int:
    """Bytes that what is kept for postponed weight gradients may take, asked before the first of them."""
    from freescale.kernels.runtime import free_bytes

    if config.pipeline.postpone_mb is not None:
        return int(config.pipeline.postpone_mb * (1 << 20))
    return free_bytes(device) // 4 if device.type == "cuda" else 2 << 30


def postpone_share(config: Config, ranks: Ranks, switch: Switch, *, postpones: bool) -> PostponeShare | None:
    """Decides how much is postponed; None where all of it is, or nothing."""
    from freescale.pipeline import PostponeShare

    if not postpones or config.pipeline.postpone != "auto":
        return None
    return PostponeShare(ranks=ranks, every=config.pipeline.decide_every, hides=switch.prioritized)


def prepares_ahead(config: Config, ranks: Ranks, tables: RunTables) -> bool:
    """Whether a thread makes batches ready: on one GPU, where the host is the bottleneck and has cores to spare."""
    from freescale.pipeline import AHEAD

    wanted = ranks.device.type == "cuda" if config.pipeline.ahead is None else config.pipeline.ahead
    guarded = tables.guard is None or tables.guard >= AHEAD
    return wanted and guarded and ranks.num_ranks == 1


def schedule_opener(
    config: Config,
    ranks: Ranks,
    progress: Progress,
    *,
    learner: Learner,
    samples: Samples,
    stages: Stages,
    stop: StopRequest,
) -> Callable[[int], Schedule]:
    """(first step) -> batches with their rows, from there to the end; padded where steps are recorded."""
    from freescale.pipeline import LayoutPlanner, PlainSchedule, PrioritizedSchedule

    tables, capture, timetable = learner.tables, stages.capture, samples.timetable
    # On a CPU there is nothing to bring anywhere, and the model makes what it needs.
    layouts = None
    if ranks.device.type == "cuda":
        layouts = LayoutPlanner(ranks.device, parts=config.optim.accumulate)

    def may_look_past(step: int) -> bool:
        """A map that learns is evaluated and saved as the step before left it: without ids of later batches."""
        return not tables.learns or not (stop.last_step == step + 1 or any(timetable.due(step + 1)))

    def open_schedule(first_step: int) -> Schedule:
        batches = _open_batches(config, ranks, tables, samples=samples, stages=stages, first_step=first_step)
        shared: dict[str, Any] = {
            "embedding": tables.embedding,
            "id_map": tables.id_map,
            "device": ranks.device,
            "first_step": first_step,
            "look_past": may_look_past,
            "layouts": layouts,
            "features": tables.features,
            "padder": capture.padder,
        }
        if not hides_traffic(config, tables.embedding, ranks):
            ahead = prepares_ahead(config, ranks, tables)
            return PlainSchedule(batches, **shared, ahead=ahead, rows_in_step=capture.tables is not None)
        return PrioritizedSchedule(
            batches,
            **shared,
            prioritized=stages.switch.prioritized,
            check=config.pipeline.check,
            chunk_mb=config.pipeline.chunk_mb,
            gate=learner.gate,
            beside=stages.postpone_bytes is not None,
            channels=_told_channels(config, ranks, progress, tables, first_step=first_step),
        )

    return open_schedule


def makes_parcels(config: Config, padder: Padder | None) -> bool:
    """Whether loader processes can write batches as they will travel: a parcel is a whole step."""
    return padder is not None and config.optim.accumulate == 1


def _open_batches(
    config: Config, ranks: Ranks, tables: RunTables, *, samples: Samples, stages: Stages, first_step: int
) -> ParcelLoader | LoadedBatches:
    """Batches to the end of the run, loaded by processes of their own where there are some."""
    from freescale.pipeline import ParcelLoader, ParcelMaker, RowFinder, load_batches

    num_steps = samples.timetable.total_steps - first_step
    padder, workers = stages.capture.padder, stages.processes.here
    if padder is not None and workers and makes_parcels(config, padder):
        finder = RowFinder.of(tables.embedding, tables.id_map, tables.features)
        maker = ParcelMaker(samples.sampler, samples.examples, finder, padder)
        return ParcelLoader(maker, first_step=first_step, num_steps=num_steps, workers=workers)
    return load_batches(
        samples.sampler,
        samples.examples,
        first_step=first_step,
        num_steps=num_steps,
        workers=workers,
        pin=ranks.device.type == "cuda" and padder is None,  # a padded batch travels as one parcel
    )


def _told_channels(
    config: Config, ranks: Ranks, progress: Progress, tables: RunTables, *, first_step: int
) -> Channels:
    """By which ways ids and rows travel; on several machines that is said."""
    from freescale.comm.transports import describe_transport
    from freescale.comm.world import on_one_machine
    from freescale.recipe.comm import row_channels

    stages = tables.embedding.stages
    channels = row_channels(config, ranks, None if stages is None else stages.groups)
    if not on_one_machine():
        inside = "" if channels.inside is None else f"; in the node by {channels.inside.ids.name}"
        progress.notice(first_step, f"ids travel by {describe_transport(channels.ids)}{inside}")
    return channels
