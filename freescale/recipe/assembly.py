"""From a recipe to a run: the order of construction on one page; how a part is built stands in its subject's file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks, sharing_machine
from freescale.data import DataDigest, LogSource, SequenceSource, digest_data
from freescale.embedding import ShardedEmbedding
from freescale.pipeline import Switch
from freescale.recipe.balance import build_rebalancer, build_sampler, first_decisions, sample_work
from freescale.recipe.building.capture import build_capture
from freescale.recipe.building.idle_keys import tell_idle
from freescale.recipe.building.loading import loader_processes
from freescale.recipe.building.plain_attention import plain_attention
from freescale.recipe.building.run_parts import Learner, Samples, Stages
from freescale.recipe.building.run_tables import build_tables
from freescale.recipe.config import Config
from freescale.recipe.data import build_examples
from freescale.recipe.eval import build_evaluation
from freescale.recipe.features import build_features
from freescale.recipe.ffn import build_expert_exchange
from freescale.recipe.items import build_item_encoder, digest_content, item_content
from freescale.recipe.log import (
    build_log,
    build_log_evaluation,
    check_log,
    digest_log,
    window_timetable,
)
from freescale.recipe.model import build_model
from freescale.recipe.optim import build_optimizer, learning_rate
from freescale.recipe.pipeline import makes_parcels, postpone_bytes, postpone_share, schedule_opener
from freescale.recipe.reading.identity import run_identity
from freescale.recipe.run import timetable_of
from freescale.recipe.tokens import build_featured_items
from freescale.recipe.trace import build_accounts
from freescale.train import (
    Checkpoints,
    ContentInput,
    ExpertLoad,
    FeaturedItems,
    ItemEncoder,
    OwnedParameters,
    Progress,
    Run,
    RunState,
    StopRequest,
    TextInput,
    Timetable,
    TrainStep,
    WindowTimetable,
    agree_on_data,
    id_reports,
    lengths_of_split_experts,
    rows_of_items,
)


def build_run(
    config: Config,
    source: SequenceSource,
    ranks: Ranks,
    progress: Progress,
    *,
    stop: StopRequest | None = None,
    judged: Mapping[str, Any] | None = None,
) -> Run:
    """A whole run, ready for `train`; it ends early where `stop` says so.

    `judged` is how it was judged before, as its checkpoints say: what data decided that are gone since.
    """
    stop = stop or StopRequest()
    if isinstance(source, LogSource):
        check_log(config, source, ranks)
    content = item_content(config, source)
    data = _digest(source, content)
    hosts = agree_on_data(ranks, data)

    learner = build_learner(config, source, ranks, progress, content=content)
    samples = build_samples(config, source, ranks, learner)
    ranks.agree(agreement(learner.tables.embedding), subject="the run")
    items = _item_vectors(config, source, ranks, learner)
    stages = build_stages(config, ranks, progress, learner=learner, samples=samples)
    open_schedule = schedule_opener(
        config, ranks, progress, learner=learner, samples=samples, stages=stages, stop=stop
    )
    train_step = _train_step(config, ranks, learner, stages, items)
    if learner.experts is not None:
        learner.experts.stands_still = train_step.timer.standing_still

    log = samples.log
    return Run(
        ranks=ranks,
        state=RunState(
            model=learner.model,
            optimizer=learner.optimizer,
            owned=learner.owned,
            embedding=learner.tables.embedding,
            id_maps=learner.tables.id_maps,
            extensions=learner.extensions,
            recipe=config.as_dict(),
            data=data,
            hosts=hosts,
            identity=run_identity(config.as_dict(), data.fingerprint),
        ),
        timetable=samples.timetable,
        open_schedule=open_schedule,
        usual_tokens=samples.sampler.usual_tokens(parts=config.optim.accumulate),
        train_step=train_step,
        rebalancer=build_rebalancer(config, ranks, samples.decisions, most_workers=stages.processes.most),
        switch=stages.switch,
        postponing=stages.postponing,
        evaluation=build_log_evaluation(config, log, model=learner.model, items=items, judged=judged)
        if log is not None
        else build_evaluation(config, source, model=learner.model, items=items, ranks=ranks),
        checkpoints=Checkpoints(Path(config.run.out) / "checkpoints", ranks=ranks, keep=config.run.keep),
        progress=progress,
        accounts=build_accounts(config, ranks, progress),
        stop=stop,
        log=log,
        train_samples=0 if log is not None else len(samples.examples.lengths()),
    )


def build_learner(
    config: Config,
    source: SequenceSource,
    ranks: Ranks,
    progress: Progress,
    *,
    content: ContentInput | TextInput | None,
) -> Learner:
    """What learns: the dense part and the tables."""
    gate = Gate()
    experts = build_expert_exchange(config, ranks, gate)
    features = build_features(config, source)
    model = build_model(config, source, experts=experts, content=content, features=features).to(ranks.device)
    tables = build_tables(config, source, ranks, features)
    tell_idle(config, features, ranks, progress)
    return Learner(
        model=model,
        tables=tables,
        optimizer=build_optimizer(config, model, ranks.device),
        owned=OwnedParameters(model, ranks, lengths=lengths_of_split_experts(model)),
        extensions=(*id_reports(tables.id_maps, ranks), ExpertLoad(model)),
        gate=gate,
        content=content,
        features=features,
        experts=experts,
    )


def build_samples(config: Config, source: SequenceSource, ranks: Ranks, learner: Learner) -> Samples:
    """What it learns from: which samples make a step, who computes them, and for how long."""
    train = build_examples(config, source, "train", negatives=learner.model.head.needs.negatives)
    decisions = first_decisions(config, ranks)
    sampler = build_sampler(config, train, ranks, decisions)
    log = build_log(config, sampler, train, learner.tables, ranks)
    timetable: Timetable | WindowTimetable
    if log is not None:
        timetable = window_timetable(config, log)
    else:
        timetable = timetable_of(config, steps_per_epoch=sampler.batches.steps_in_epoch(0))
    return Samples(train, sampler, decisions, log, timetable)


def build_stages(
    config: Config, ranks: Ranks, progress: Progress, *, learner: Learner, samples: Samples
) -> Stages:
    """How: in which order batches and rows travel, and what of a step waits."""
    model, embedding = learner.model, learner.tables.embedding
    switch = Switch(on=True, ranks=ranks, every=config.pipeline.decide_every)
    lr_factor = learning_rate(config, total_steps=samples.timetable.total_steps)
    if (slow := plain_attention(config, model, kind=ranks.device.type)) is not None:
        progress.notice(0, slow)
    capture = build_capture(
        config,
        ranks,
        progress,
        model=model,
        tables=learner.tables,
        lr_factor=lr_factor,
        sampler=samples.sampler,
        examples=samples.examples,
    )
    postponed = postpone_bytes(
        config,
        embedding,
        ranks,
        progress,
        captured=capture.recorder is not None,
        calls_layers=bool(getattr(getattr(model, "encoder", None), "calls_layers", False)),
    )
    postponing = postpone_share(config, ranks, switch, postpones=postponed is not None)
    processes = loader_processes(
        config,
        replayed=makes_parcels(config, capture.padder),
        features=learner.features is not None,
        on_gpu=ranks.device.type == "cuda",
        several=ranks.num_ranks > 1,
        sharing=sharing_machine(ranks.num_ranks),
    )
    return Stages(switch, lr_factor, capture, postponed, postponing, processes)


def _digest(source: SequenceSource, content: ContentInput | TextInput | None) -> DataDigest:
    """What all ranks must have read alike."""
    if isinstance(source, LogSource):
        return digest_log(source)
    return digest_data(source, content=digest_content(content))


def _item_vectors(config: Config, source: SequenceSource, ranks: Ranks, learner: Learner) -> ItemEncoder:
    """Where item vectors come from."""
    model, tables, content = learner.model, learner.tables, learner.content
    if learner.features is not None and content is None:
        return build_featured_items(config, ranks, learner.features, model=model, tables=tables)
    return build_item_encoder(
        config,
        source,
        ranks,
        model=model,
        content=content,
        embedding=tables.embedding,
        id_map=tables.id_map,
    )


def _train_step(
    config: Config, ranks: Ranks, learner: Learner, stages: Stages, items: ItemEncoder
) -> TrainStep:
    return TrainStep(
        learner.model,
        learner.optimizer,
        ranks=ranks,
        owned=learner.owned,
        extensions=learner.extensions,
        encode_items=items.encode,
        lr=config.optim.lr,
        table_lr=config.embedding.lr,
        lr_factor=stages.lr_factor,
        clip_norm=config.optim.clip_norm,
        accumulate=config.optim.accumulate,
        # A CPU multiplies in bfloat16 many times slower than in float32.
        autocast=config.model.dtype == "bfloat16" and ranks.device.type == "cuda",
        seed=config.run.seed,
        gate=learner.gate,
        transport=config.comm.transport,
        sums=config.comm.sums,
        work=sample_work(config, learner.features),
        recorder=stages.capture.recorder,
        tables=stages.capture.tables,
        vectors_of=items.vectors if isinstance(items, FeaturedItems) else rows_of_items,
        postpone_bytes=stages.postpone_bytes,
        postpone_share=None if stages.postponing is None else stages.postponing.share,
    )


def same_recipe(config: Config) -> dict[str, Any]:
    """What all ranks must see alike before anything is built: parts of a run talk to each other while they are made."""
    from freescale.version import __version__

    recipe = {
        f"{section}.{key}": value for section, keys in config.as_dict().items() for key, value in keys.items()
    }
    return {**recipe, "freescale version": __version__, "torch version": torch.__version__}


def agreement(embedding: ShardedEmbedding) -> dict[str, Any]:
    """What all ranks must see alike before the first step: tables."""
    return {
        f"table {name}": [plan.spec.num_rows, plan.spec.dim, str(plan.spec.dtype)]
        for name, plan in embedding.plans.items()
    }
