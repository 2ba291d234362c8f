"""From a recipe to objects; with `model_assembly` the only file that knows every class."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale import trace
from freescale.balance import BalancedSampler, CostModel, Decisions, SampleWork
from freescale.comm import Transport
from freescale.comm.traffic import Channels, Gate, open_channels, open_cpu_channel
from freescale.comm.transports import TracedTransport, make_transport
from freescale.comm.world import Ranks, SharedClock, device_name
from freescale.data import (
    Examples,
    ParquetSource,
    SequenceSource,
    Split,
    SyntheticSource,
    check_source,
    is_dataset,
    prepare,
)
from freescale.embedding import (
    DirectMap,
    HashMap,
    IdMap,
    ShardedEmbedding,
    ShardedIdMap,
    TableSpec,
    make_eviction,
    make_optimizer,
)
from freescale.errors import DataError
from freescale.kernels.id_table import make_layout
from freescale.pipeline import (
    AHEAD,
    LOOK_AHEAD,
    TABLE,
    PlainSchedule,
    PrioritizedSchedule,
    Schedule,
    Switch,
    load_batches,
)
from freescale.recipe.load import Config
from freescale.recipe.model_assembly import (
    build_expert_exchange,
    build_item_encoder,
    build_model,
    build_optimizer,
    item_content,
    segment_rule,
)
from freescale.trace import SpanWriter
from freescale.train import (
    AccountedStep,
    Accounts,
    Checkpoints,
    ContentInput,
    CudaClock,
    Evaluator,
    IdReport,
    Progress,
    Rebalancer,
    Run,
    TextInput,
    TrainStep,
    due_at,
    lr_factor,
    popularity_quality,
    write_step,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_source(config: Config, *, cache: Path | None = None) -> SequenceSource:
    """The data set of a recipe; a raw file is prepared into `cache` first."""
    if config.data.path == "synthetic":
        options = config.synthetic
        return SyntheticSource(
            num_users=options.users,
            num_items=options.items,
            mean_length=options.mean_length,
            sigma=options.sigma,
            max_length=options.max_length,
            zipf=options.zipf,
            preference=options.preference,
            seed=config.run.seed,
        )
    path = Path(config.data.path)
    if not path.exists():
        raise DataError(
            "data.path does not exist",
            got=path,
            next_step="`freescale prepare INPUT OUT_DIR` makes a data set",
        )
    if not is_dataset(path):
        assert cache is not None
        if not is_dataset(cache):
            prepare(path, cache)
        path = cache
    source = ParquetSource(path, cache_mb=config.data.cache_mb)
    check_source(source)
    return source


def build_examples(config: Config, source: SequenceSource, split: Split) -> Examples:
    """One split of the data; only training draws negatives."""
    draws = split == "train" and config.head.kind == "retrieval"
    return Examples(
        source=source,
        split=split,
        max_length=config.data.max_length,
        use_time=config.data.use_time,
        num_negatives=config.head.num_negatives if draws else 0,
        seed=config.run.seed,
    )


def build_tables(config: Config, source: SequenceSource, ranks: Ranks) -> tuple[ShardedEmbedding, IdMap]:
    """The item table, and how raw ids become its rows; no table where nothing looks at ids."""
    options = config.embedding
    if config.items.kind != "ids" and not config.items.add_ids:
        return ShardedEmbedding([], group=ranks.group, device=ranks.device), HashMap(1)
    if options.id_map == "hash":
        assert options.rows is not None
        hashed = HashMap(options.rows)
        return build_embedding(config, hashed.num_rows, ranks), hashed
    if options.id_map == "direct":
        direct = DirectMap(options.rows or int(source.items.ids[-1]) + 1)
        return build_embedding(config, direct.num_rows, ranks), direct
    rows = options.rows or max(64, len(source.items.ids) * 3 // 2)
    layout = make_layout(rows, num_buckets=options.buckets, max_probe=options.max_probe)
    embedding = build_embedding(config, layout.num_rows, ranks, row_group=layout.bucket_rows)
    return embedding, ShardedIdMap(
        embedding,
        TABLE,
        channel=id_channel(config, ranks) if hides_traffic(config, embedding, ranks) else None,
        max_probe=options.max_probe,
        eviction=make_eviction(options.eviction, ttl=options.ttl),
        admit_after=options.admit_after,
        admission=options.admission,
        guard=options.guard,
    )


def id_channel(config: Config, ranks: Ranks) -> Transport:
    """How ids travel to their owners while the training thread has traffic of its own under way."""
    assert ranks.group is not None
    return TracedTransport(
        open_cpu_channel(
            ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
        )
    )


def build_embedding(config: Config, num_rows: int, ranks: Ranks, *, row_group: int = 1) -> ShardedEmbedding:
    """The item table."""
    options = config.embedding
    spec = TableSpec(
        name=TABLE,
        num_rows=num_rows,
        row_group=row_group,
        dim=config.model.dim,
        optimizer=make_optimizer(
            options.optimizer, beta1=config.optim.beta1, beta2=options.beta2, eps=options.eps
        ),
        dtype=torch.float64 if config.model.dtype == "float64" else _DTYPES[options.dtype],
        seed=config.run.seed,
    )
    transport = make_transport(
        ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
    )
    return ShardedEmbedding(
        [spec],
        group=ranks.group,
        device=ranks.device,
        replicate_below_mb=options.replicate_below_mb,
        transport=transport if ranks.num_ranks == 1 else TracedTransport(transport),
    )


def build_sampler(
    config: Config, train: Examples, ranks: Ranks, decisions: Decisions | None = None
) -> BalancedSampler:
    """Which samples make a step, and who computes them."""
    tokens = config.data.global_tokens
    return BalancedSampler(
        train.lengths(),
        global_batch=None if tokens else config.data.global_batch,
        global_tokens=tokens,
        num_ranks=ranks.num_ranks,
        rank=ranks.rank,
        seed=config.run.seed,
        balanced=config.balance.enabled,
        max_tokens_ratio=config.balance.max_tokens_ratio,
        window=config.balance.window,
        groups=train.source.groups,
        shuffle_rows=config.data.shuffle_rows,
        decisions=decisions,
        work=SampleWork(segment_rule(config)),
    )


def build_accounts(config: Config, ranks: Ranks, progress: Progress) -> Accounts:
    """What accounts for the time of every step; spans are recorded from here on."""

    def write(step: AccountedStep) -> None:
        write_step(progress, step)

    if not config.trace.enabled:
        trace.record_into(None)
        return Accounts(ranks=ranks, recorder=None, write=write)
    recorder = trace.Recorder(CudaClock(ranks.device) if ranks.device.type == "cuda" else None)
    trace.record_into(recorder)
    return Accounts(
        ranks=ranks, recorder=recorder, write=write, every=config.run.log_every, clock=SharedClock(ranks)
    )


def open_span_file(run: Run, config: Config) -> None:
    """Let the accounts keep the spans of this rank, with one time zero for all of them."""
    accounts = run.accounts
    if accounts.recorder is None:
        return
    assert accounts.clock is not None
    accounts.spans = SpanWriter(
        Path(config.run.out),
        rank=run.ranks.rank,
        num_ranks=run.ranks.num_ranks,
        origin=accounts.clock.origin,
        facts={"host": platform.node(), "device": device_name(run.ranks.device)},
    )


def build_run(config: Config, source: SequenceSource, ranks: Ranks, progress: Progress) -> Run:
    """A whole run, ready for `train`."""
    train, valid, test = (build_examples(config, source, split) for split in ("train", "valid", "test"))
    gate = Gate()
    experts = build_expert_exchange(config, ranks, gate)
    content = item_content(config, source)
    model = build_model(config, source, experts=experts, content=content).to(ranks.device)
    embedding, id_map = build_tables(config, source, ranks)
    known = config.balance.cost_model
    decisions = Decisions(CostModel.load(known) if known else CostModel.default(), num_ranks=ranks.num_ranks)
    sampler = build_sampler(config, train, ranks, decisions)
    steps_per_epoch = sampler.batches.steps_in_epoch(0)
    total_steps = config.run.steps or max(1, round(config.run.epochs * steps_per_epoch))
    ranks.agree(agreement(config, embedding, source, content), subject="the run")
    items = build_item_encoder(
        config, source, ranks, model=model, content=content, embedding=embedding, id_map=id_map
    )
    optim, optimizer = config.optim, build_optimizer(config, model, ranks.device)

    def factor(step: int) -> float:
        return lr_factor(
            step, schedule=optim.schedule, warmup_steps=optim.warmup_steps, total_steps=total_steps
        )

    eval_every = config.run.eval_every or steps_per_epoch
    learns_ids = isinstance(id_map, ShardedIdMap)

    def may_look_past(step: int) -> bool:
        """A map that learns is evaluated and saved as the step before left it: without ids of later batches."""
        return not learns_ids or not any(
            due_at(step + 1, every=eval_every, save_every=config.run.checkpoint_every)
        )

    switch = Switch(on=True, ranks=ranks, every=config.pipeline.decide_every)

    def open_schedule(first_step: int) -> Schedule:
        batches = load_batches(
            sampler,
            train,
            first_step=first_step,
            num_steps=total_steps - first_step,
            workers=config.data.workers,
            pin=ranks.device.type == "cuda",
        )
        if not hides_traffic(config, embedding, ranks):
            return PlainSchedule(
                batches,
                embedding=embedding,
                id_map=id_map,
                device=ranks.device,
                ahead=prepares_ahead(config, ranks),
                first_step=first_step,
                look_past=may_look_past,
            )
        return PrioritizedSchedule(
            batches,
            embedding=embedding,
            id_map=id_map,
            device=ranks.device,
            first_step=first_step,
            prioritized=switch.prioritized,
            look_past=may_look_past,
            check=config.pipeline.check,
            chunk_mb=config.pipeline.chunk_mb,
            gate=gate,
            channels=traced_channels(
                open_channels(
                    ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
                )
            ),
        )

    train_step = TrainStep(
        model,
        optimizer,
        ranks=ranks,
        encode_items=items.encode,
        lr=optim.lr,
        table_lr=config.embedding.lr,
        lr_factor=factor,
        clip_norm=optim.clip_norm,
        accumulate=optim.accumulate,
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
        rebalancer=Rebalancer(
            decisions=decisions,
            ranks=ranks,
            every=config.balance.refit_every if config.balance.enabled else None,
            # The loader has at most two batches a process under way, and the schedule those it looks ahead to.
            lookahead=2 * config.data.workers + 2 + LOOK_AHEAD,
        ),
        switch=switch,
        open_schedule=open_schedule,
        evaluator=Evaluator(
            model=model,
            items=items,
            ranks=ranks,
            batch=config.eval.batch,
            item_chunk=config.eval.item_chunk,
        ),
        valid=valid,
        test=test,
        checkpoints=Checkpoints(Path(config.run.out) / "checkpoints", ranks=ranks, keep=config.run.keep),
        progress=progress,
        accounts=build_accounts(config, ranks, progress),
        total_steps=total_steps,
        usual_tokens=sampler.usual_tokens(parts=optim.accumulate),
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
        recipe=dataclasses.asdict(config),
    )


def traced_channels(channels: Channels) -> Channels:
    """The same connections, their exchanges recorded."""
    bulk = TracedTransport(channels.bulk)
    ids = bulk if channels.ids is channels.bulk else TracedTransport(channels.ids)
    return Channels(express=TracedTransport(channels.express), bulk=bulk, ids=ids)


def hides_traffic(config: Config, embedding: ShardedEmbedding, ranks: Ranks) -> bool:
    """Whether there is embedding traffic to hide: several ranks, and a table that is spread over them."""
    sharded = any(not plan.replicated for plan in embedding.plans.values())
    return config.pipeline.prioritized and ranks.num_ranks > 1 and sharded


def prepares_ahead(config: Config, ranks: Ranks) -> bool:
    """Whether a thread makes batches ready: on one GPU, where the host is the bottleneck and has cores to spare."""
    wanted = ranks.device.type == "cuda" if config.pipeline.ahead is None else config.pipeline.ahead
    guarded = config.embedding.id_map != "zero_collision" or config.embedding.guard >= AHEAD
    return wanted and guarded and ranks.num_ranks == 1


def agreement(
    config: Config,
    embedding: ShardedEmbedding,
    source: SequenceSource,
    content: ContentInput | TextInput | None = None,
) -> dict[str, Any]:
    """What all ranks must see alike before the first collective."""
    from freescale import __version__

    recipe = {
        f"{section}.{key}": value
        for section, keys in dataclasses.asdict(config).items()
        for key, value in keys.items()
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
