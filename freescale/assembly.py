"""From a recipe to objects. The only file that knows every class."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.balance.cost_model import CostModel
from freescale.balance.decisions import Decisions
from freescale.balance.sampler import BalancedSampler
from freescale.balance.work import SampleWork
from freescale.comm.clocks import SharedClock
from freescale.comm.lanes import open_lane, open_lanes
from freescale.comm.priority import Gate, Lanes
from freescale.comm.ranks import Ranks, device_name
from freescale.comm.transport import Transport, make_transport
from freescale.comm.watched import WatchedTransport
from freescale.config import Config
from freescale.data.examples import Examples, Split, check_source
from freescale.data.item_content import CONTENT_FILE, ContentFile
from freescale.data.item_texts import TEXTS_FILE, load_texts
from freescale.data.parquet_source import ParquetSource, is_dataset
from freescale.data.prepare import prepare
from freescale.data.segment_rule import SegmentRule
from freescale.data.source import SequenceSource
from freescale.data.synthetic import SyntheticSource
from freescale.data.vocabulary import NumberedTexts, Vocabulary
from freescale.embedding.eviction import make_eviction
from freescale.embedding.id_map import DirectMap, HashMap, IdMap
from freescale.embedding.optimizer import make_optimizer
from freescale.embedding.owned_ids import OwnedIds
from freescale.embedding.plan import TableSpec, plan_rows
from freescale.embedding.sharded import ShardedEmbedding
from freescale.embedding.shared_work import SharedWork
from freescale.errors import ConfigError, DataError
from freescale.kernels.slot_layout import make_layout
from freescale.model.heads import RankingHead, RetrievalHead
from freescale.model.item_encoders import ContentProjection, TextEncoder
from freescale.model.recommender import Recommender, make_encoder
from freescale.pipeline.adaptive import Switch
from freescale.pipeline.loader import load_batches
from freescale.pipeline.prioritized import LOOK_AHEAD
from freescale.pipeline.schedule import TABLE, PlainSchedule, PrioritizedSchedule, Schedule
from freescale.trace import spans
from freescale.trace.span_file import SpanWriter
from freescale.train.accounting import AccountedStep, Accounts
from freescale.train.checkpoint import Checkpoints
from freescale.train.cuda_clock import CudaClock
from freescale.train.evaluate import Evaluator, popularity_quality
from freescale.train.events import Progress
from freescale.train.id_report import IdReport
from freescale.train.item_vectors import ContentInput, EncodedItems, IdItems, ItemEncoder, TextInput
from freescale.train.learning_rate import lr_factor
from freescale.train.loop import Run, due_at, write_step
from freescale.train.rebalance import Rebalancer
from freescale.train.step import TrainStep

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


def encoder_shape(config: Config, source: SequenceSource) -> dict[str, Any]:
    """What `make_encoder` needs; also what an exported model keeps."""
    options = config.model
    has_time = "time" in source.features and config.data.use_time
    return {
        "kind": options.kind,
        "dim": options.dim,
        "layers": options.layers,
        "heads": options.heads,
        "max_length": config.data.max_length,
        "position_bias": options.position_bias,
        "time_bias": options.kind == "hstu" and options.time_bias and has_time,
        "segments": None if config.segments.recent is None else dataclasses.asdict(config.segments),
        "kv_heads": options.kv_heads,
        "ffn_dim": options.ffn_dim,
        "rope_base": options.rope_base,
    }


def segment_rule(config: Config) -> SegmentRule | None:
    """How histories are cut, where they are."""
    options = config.segments
    if options.recent is None:
        return None
    return SegmentRule(recent=options.recent, length=options.length, summaries=options.summaries)


def build_model(
    config: Config, source: SequenceSource, content: ContentInput | TextInput | None = None
) -> Recommender:
    """The dense part, with initial weights that depend on the seed alone."""
    torch.manual_seed(config.run.seed)
    encoder = make_encoder(**encoder_shape(config, source), dropout=config.model.dropout)
    model = Recommender(
        encoder=encoder, head=build_head(config, source), items=build_item_module(config, content)
    )
    return model.double() if config.model.dtype == "float64" else model


def build_head(config: Config, source: SequenceSource) -> torch.nn.Module:
    """What the model is trained to predict."""
    options = config.head
    if options.kind == "retrieval":
        return RetrievalHead(temperature=options.temperature, normalize=options.normalize)
    if "action" not in source.features:
        raise ConfigError(
            "head.kind=ranking needs actions (ratings, clicks, ...) in the data",
            got=f"{source.name} has {', '.join(source.features)}",
            next_step="prepare the data with an action column, or use head.kind=retrieval",
        )
    return RankingHead(dim=config.model.dim, thresholds=options.label_thresholds)


def item_content(config: Config, source: SequenceSource) -> ContentInput | TextInput | None:
    """What is known of items, besides their ids."""
    options, ids = config.items, source.items.ids
    if options.kind == "ids":
        return None
    folder = source.path if isinstance(source, ParquetSource) else None
    if options.file is None and folder is None:
        raise ConfigError(
            f"items.kind={options.kind} needs to know the items",
            got=f"{source.name} has ids only",
            next_step="set items.file, or train on a prepared folder that has the file",
        )
    usual = CONTENT_FILE if options.kind == "content" else TEXTS_FILE
    path = Path(options.file) if options.file is not None else Path(str(folder)) / usual
    if options.kind == "content":
        return ContentInput(ContentFile(path, num_items=len(ids)))
    texts = load_texts(path, ids)
    words = options.vocabulary == "words"
    vocabulary = Vocabulary.of_words(texts, min_count=options.min_count) if words else Vocabulary.of_bytes()
    return TextInput(NumberedTexts.of(texts, vocabulary, max_tokens=options.max_tokens))


def build_item_module(config: Config, content: ContentInput | TextInput | None) -> torch.nn.Module | None:
    """What computes item vectors, if anything does."""
    if isinstance(content, ContentInput):
        return ContentProjection(width=content.file.width, dim=config.model.dim)
    if isinstance(content, TextInput):
        return TextEncoder(
            vocabulary_size=content.texts.vocabulary_size,
            dim=config.model.dim,
            width=config.items.dim,
            layers=config.items.layers,
            heads=config.items.heads,
            dropout=config.items.dropout,
        )
    return None


def build_item_encoder(
    config: Config,
    source: SequenceSource,
    ranks: Ranks,
    *,
    model: Recommender,
    content: ContentInput | TextInput | None,
    embedding: ShardedEmbedding,
    id_map: IdMap,
) -> ItemEncoder:
    """Where item vectors come from."""
    rows = IdItems(embedding=embedding, id_map=id_map, device=ranks.device)
    if content is None:
        return rows
    assert model.items is not None
    ways: dict[str, Transport] = {}
    if ranks.group is not None:
        options: dict[str, Any] = {"kind": config.comm.transport, "timeout_s": ranks.timeout_s}
        numbers = WatchedTransport(open_lane(ranks.group, **options))
        on_cpu = ranks.device.type == "cpu"
        vectors = (
            numbers if on_cpu else WatchedTransport(open_lane(ranks.group, device=ranks.device, **options))
        )
        ways = {"numbers": numbers, "vectors": vectors}
    return EncodedItems(
        model.items,
        content,
        items=source.items.ids,
        work=SharedWork(len(source.items.ids), **ways),
        rows=rows if config.items.add_ids else None,
        device=ranks.device,
        # A projection costs less than sending its result.
        alone=config.items.kind == "content",
        chunk=config.items.chunk,
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
    return embedding, OwnedIds(
        embedding,
        TABLE,
        lane=id_lane(config, ranks) if hides_traffic(config, embedding, ranks) else None,
        max_probe=options.max_probe,
        eviction=make_eviction(options.eviction, ttl=options.ttl),
        admit_after=options.admit_after,
        admission=options.admission,
        guard=options.guard,
    )


def id_lane(config: Config, ranks: Ranks) -> Transport:
    """How ids travel to their owners while the training thread has traffic of its own under way."""
    assert ranks.group is not None
    return WatchedTransport(open_lane(ranks.group, kind=config.comm.transport, timeout_s=ranks.timeout_s))


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
        transport=transport if ranks.num_ranks == 1 else WatchedTransport(transport),
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
        spans.record_into(None)
        return Accounts(ranks=ranks, recorder=None, write=write)
    recorder = spans.Recorder(CudaClock(ranks.device) if ranks.device.type == "cuda" else None)
    spans.record_into(recorder)
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
    content = item_content(config, source)
    model = build_model(config, source, content).to(ranks.device)
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
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
    )

    def factor(step: int) -> float:
        return lr_factor(
            step, schedule=optim.schedule, warmup_steps=optim.warmup_steps, total_steps=total_steps
        )

    eval_every = config.run.eval_every or steps_per_epoch
    learns_ids = isinstance(id_map, OwnedIds)

    def may_look_past(step: int) -> bool:
        """A map that learns is evaluated and saved as the step before left it: without ids of later batches."""
        return not learns_ids or not any(
            due_at(step + 1, every=eval_every, save_every=config.run.checkpoint_every)
        )

    gate = Gate()
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
            return PlainSchedule(batches, embedding=embedding, id_map=id_map, device=ranks.device)
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
            lanes=watched_lanes(
                open_lanes(
                    ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
                )
            ),
        )

    retrieval = config.head.kind == "retrieval"
    return Run(
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        embedding=embedding,
        id_map=id_map,
        id_report=IdReport(id_map, ranks),
        train_step=TrainStep(
            model,
            optimizer,
            ranks=ranks,
            encode_items=items.encode,
            lr=optim.lr,
            table_lr=config.embedding.lr,
            lr_factor=factor,
            clip_norm=optim.clip_norm,
            accumulate=optim.accumulate,
            autocast=config.model.dtype == "bfloat16",
            seed=config.run.seed,
            gate=gate,
            work=SampleWork(segment_rule(config)),
        ),
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


def watched_lanes(lanes: Lanes) -> Lanes:
    """The same connections, their exchanges recorded."""
    bulk = WatchedTransport(lanes.bulk)
    ids = bulk if lanes.ids is lanes.bulk else WatchedTransport(lanes.ids)
    return Lanes(express=WatchedTransport(lanes.express), bulk=bulk, ids=ids)


def hides_traffic(config: Config, embedding: ShardedEmbedding, ranks: Ranks) -> bool:
    """Whether there is embedding traffic to hide: several ranks, and a table that is spread over them."""
    sharded = any(not plan.replicated for plan in embedding.plans.values())
    return config.pipeline.prioritized and ranks.num_ranks > 1 and sharded


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


def describe(run: Run, config: Config, source: SequenceSource) -> dict[str, dict[str, object]]:
    """Facts to show before the first step: data, model, plan."""
    lengths = np.asarray(source.lengths)
    p50, p95, p99 = (int(x) for x in np.percentile(lengths, [50, 95, 99]))
    dense = sum(param.numel() for param in run.model.parameters())
    plans = list(run.embedding.plans.values())
    distinct = (
        config.data.global_batch * (config.head.num_negatives + int(lengths.mean())) // run.ranks.num_ranks
    )
    facts: dict[str, dict[str, object]] = {
        "data": {
            "name": source.name,
            "users": f"{len(lengths):,}",
            "items": f"{len(source.items.ids):,}",
            "events": f"{int(lengths.sum()):,}",
            "events a user": f"p50 {p50}  p95 {p95}  p99 {p99}  max {int(lengths.max())}",
        },
        "model": {
            "kind": f"{config.model.kind}, {config.model.layers} layers, dim {config.model.dim}, {config.model.dtype}",
            "dense parameters": f"{dense:,}",
            "table parameters": f"{sum(p.spec.num_rows * p.spec.dim for p in plans):,}",
            **({} if config.items.kind == "ids" else {"items": items_in_words(config, run)}),
        },
        "run": {
            "ranks": f"{run.ranks.num_ranks} on {run.ranks.device.type}",
            "steps": f"{run.total_steps:,}, evaluated every {run.eval_every:,}",
            "folder": config.run.out,
        },
    }
    if config.segments.recent is not None:
        cut = f"{config.segments.length} events, {config.segments.summaries} summaries"
        facts["model"]["segments"] = f"{cut}; latest {config.segments.recent} whole"
    if run.ranks.num_ranks > 1 and plans:
        for row in plan_rows(plans, distinct_ids=min(distinct, plans[0].spec.num_rows)):
            facts.setdefault("plan", {})[f"rank {row['rank']} {row['table']}"] = (
                f"{row['rows']} rows  {row['MiB']} MiB  {row['traffic MiB/step']} MiB/step"
            )
    return facts


def items_in_words(config: Config, run: Run) -> str:
    """What item vectors are made of, for people."""
    assert run.model.items is not None
    size = sum(param.numel() for param in run.model.items.parameters())
    added = "rows of the table added" if config.items.add_ids else "no table"
    return f"{config.items.kind}, {size:,} parameters, {added}"
