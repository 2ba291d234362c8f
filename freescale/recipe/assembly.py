"""From a recipe to a run: the order of construction on one page; how a part is built stands in its subject's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.balance import SampleWork
from freescale.comm.traffic import Gate
from freescale.comm.world import Ranks
from freescale.data import SequenceSource
from freescale.embedding import ShardedEmbedding, ShardedIdMap
from freescale.pipeline import Switch
from freescale.recipe.balance import build_rebalancer, build_sampler, first_decisions
from freescale.recipe.config import Config
from freescale.recipe.data import build_examples
from freescale.recipe.embedding import build_tables
from freescale.recipe.eval import build_evaluator
from freescale.recipe.ffn import build_expert_exchange
from freescale.recipe.items import build_item_encoder, item_content
from freescale.recipe.model import build_model
from freescale.recipe.optim import build_optimizer, learning_rate
from freescale.recipe.pipeline import schedule_opener
from freescale.recipe.run import total_steps
from freescale.recipe.segments import segment_rule
from freescale.recipe.trace import build_accounts
from freescale.train import (
    Checkpoints,
    ContentInput,
    IdReport,
    Progress,
    Run,
    TextInput,
    TrainStep,
    due_at,
    popularity_quality,
)


def build_run(config: Config, source: SequenceSource, ranks: Ranks, progress: Progress) -> Run:
    """A whole run, ready for `train`."""
    train, valid, test = (build_examples(config, source, split) for split in ("train", "valid", "test"))

    gate = Gate()
    experts = build_expert_exchange(config, ranks, gate)
    content = item_content(config, source)
    model = build_model(config, source, experts=experts, content=content).to(ranks.device)
    embedding, id_map = build_tables(config, source, ranks)

    decisions = first_decisions(config, ranks)
    sampler = build_sampler(config, train, ranks, decisions)
    steps_per_epoch = sampler.batches.steps_in_epoch(0)
    num_steps = total_steps(config, steps_per_epoch=steps_per_epoch)
    eval_every = config.run.eval_every or steps_per_epoch

    ranks.agree(agreement(config, embedding, source, content), subject="the run")

    items = build_item_encoder(
        config, source, ranks, model=model, content=content, embedding=embedding, id_map=id_map
    )
    learns_ids = isinstance(id_map, ShardedIdMap)

    def may_look_past(step: int) -> bool:
        """A map that learns is evaluated and saved as the step before left it: without ids of later batches."""
        return not learns_ids or not any(
            due_at(step + 1, every=eval_every, save_every=config.run.checkpoint_every)
        )

    switch = Switch(on=True, ranks=ranks, every=config.pipeline.decide_every)
    open_schedule = schedule_opener(
        config,
        sampler=sampler,
        examples=train,
        embedding=embedding,
        id_map=id_map,
        ranks=ranks,
        gate=gate,
        switch=switch,
        total_steps=num_steps,
        may_look_past=may_look_past,
    )
    optimizer = build_optimizer(config, model, ranks.device)
    train_step = TrainStep(
        model,
        optimizer,
        ranks=ranks,
        encode_items=items.encode,
        lr=config.optim.lr,
        table_lr=config.embedding.lr,
        lr_factor=learning_rate(config, total_steps=num_steps),
        clip_norm=config.optim.clip_norm,
        accumulate=config.optim.accumulate,
        # A CPU multiplies in bfloat16 many times slower than in float32.
        autocast=config.model.dtype == "bfloat16" and ranks.device.type == "cuda",
        seed=config.run.seed,
        gate=gate,
        transport=config.comm.transport,
        work=SampleWork(segment_rule(config)),
    )
    if experts is not None:
        experts.stands_still = train_step.timer.standing_still
    retrieval = config.head.kind == "retrieval"
    return Run(
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        embedding=embedding,
        id_map=id_map,
        id_report=IdReport(id_map, ranks),
        expert_load=train_step.load,
        owned=train_step.owned,
        train_step=train_step,
        rebalancer=build_rebalancer(config, ranks, decisions),
        switch=switch,
        open_schedule=open_schedule,
        evaluator=build_evaluator(config, model=model, items=items, ranks=ranks),
        valid=valid,
        test=test,
        checkpoints=Checkpoints(Path(config.run.out) / "checkpoints", ranks=ranks, keep=config.run.keep),
        progress=progress,
        accounts=build_accounts(config, ranks, progress),
        total_steps=num_steps,
        usual_tokens=sampler.usual_tokens(parts=config.optim.accumulate),
        eval_every=eval_every,
        checkpoint_every=config.run.checkpoint_every,
        metric=config.eval.metric,
        patience=config.run.patience,
        max_eval_users=config.eval.max_users,
        protocol=f"full ranking, seen filtered, {len(source.items.ids):,} items"
        if retrieval
        else "next event's label",
        popularity={
            "valid": popularity_quality(valid, max_users=config.eval.max_users),
            "test": popularity_quality(test),
        }
        if retrieval and ranks.is_first
        else {},
        recipe=config.as_dict(),
    )


def agreement(
    config: Config,
    embedding: ShardedEmbedding,
    source: SequenceSource,
    content: ContentInput | TextInput | None = None,
) -> dict[str, Any]:
    """What all ranks must see alike before the first collective."""
    from freescale import __version__

    recipe = {
        f"{section}.{key}": value for section, keys in config.as_dict().items() for key, value in keys.items()
    }
    shapes = {
        f"table {name}": [plan.spec.num_rows, plan.spec.dim, str(plan.spec.dtype)]
        for name, plan in embedding.plans.items()
    }
    lengths = source.lengths
    data = {"data: histories": len(lengths), "data: events": int(np.sum(lengths))}
    if isinstance(content, TextInput):
        data["items: texts"] = content.texts.checksum
    return {**recipe, **shapes, **data, "freescale version": __version__, "torch version": torch.__version__}
