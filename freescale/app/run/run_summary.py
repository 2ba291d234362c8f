"""The summary of a run: what is trained on what, in words."""

from __future__ import annotations

import platform
import socket

import numpy as np
import torch

from freescale.app.arguments import typed_command
from freescale.comm.transports import describe_transport
from freescale.comm.world import virtual_gpus_here
from freescale.data import BatchFeatures, Feature, IntArray, SequenceSource
from freescale.embedding import ShardedEmbedding, plan_rows
from freescale.model import moe_layers
from freescale.recipe import (
    Config,
    build_features,
    expected_ids,
    item_features,
    table_options,
    token_features,
)
from freescale.registry import PYTHON, find
from freescale.train import Run
from freescale.version import __version__


def describe(run: Run, config: Config, source: SequenceSource) -> dict[str, dict[str, object]]:
    """Facts to show before the first step: data, model, plan."""
    lengths = np.asarray(source.lengths)
    p50, p95, p99 = (int(x) for x in np.percentile(lengths, [50, 95, 99]))
    dense = sum(run.state.owned.num_values(name, param) for name, param in run.state.model.named_parameters())
    plans = list(run.state.embedding.plans.values())
    facts: dict[str, dict[str, object]] = {
        "data": {
            "name": source.name,
            **_counted(run, source, lengths),
            "events a user" if run.log is None else "events a row": f"p50 {p50}  p95 {p95}  p99 {p99}  "
            f"max {int(lengths.max())}",
        },
        "model": {
            "kind": f"{_kind(config)}, dim {config.model.dim}, {config.model.dtype}",
            "dense parameters": f"{dense:,}",
            "table parameters": f"{sum(p.spec.num_rows * p.spec.dim for p in plans):,}",
            **({} if config.items.kind == "ids" else {"items": items_in_words(config, run)}),
        },
        "run": {
            "ranks": f"{run.ranks.num_ranks} on {run.ranks.device.type}"
            + (", sharing one GPU" if virtual_gpus_here() else ""),
            "steps": f"{run.timetable.total_steps:,}, {_evaluated(run)}",
            "folder": config.run.out,
        },
    }
    features = build_features(config, source)
    if features is not None:
        facts["data"]["features"] = features_in_words(config, features)
        facts["tables"] = tables_in_words(run, config, features)
    elif "action" in source.features and not _may_read_action(run, config):
        facts["data"]["not read"] = (
            "action: of no schema, and head.kind=ranking alone asks for it without one"
        )
    facts["evaluation"] = evaluation_in_words(run, config)
    for name, layer in moe_layers(run.state.model):
        first, count = layer.dispatch.block(layer.num_experts)
        held = f", {count} on this rank from {first} on" if layer.dispatch.is_split else ""
        facts["model"][name] = f"{layer.num_experts} experts, {layer.router.top_k} a token{held}"
    if config.segments.recent is not None:
        cut = f"{config.segments.length} events, {config.segments.summaries} summaries"
        facts["model"]["segments"] = f"{cut}; latest {config.segments.recent} whole"
    if run.accounts.clock_error is not None:
        facts["run"]["clocks"] = (
            f"of the machines, compared to within {1000 * run.accounts.clock_error:.3g} ms"
        )
    slow = {name: table.not_fused for name, table in run.state.embedding.tables.items() if table.not_fused}
    if run.ranks.device.type == "cuda":
        for name, reason in slow.items():
            facts["run"][f"{name} rows"] = f"updated operation by operation, not by one kernel: {reason}"
    if run.ranks.num_ranks > 1 and config.comm.sums != "auto":
        by = run.train_step.sums_by
        said = "the group of the ranks" if by is None else describe_transport(by)
        facts["run"]["dense gradients by"] = said
    if run.ranks.num_ranks > 1 and plans:
        facts["run"]["rows travel by"] = rows_in_words(run.state.embedding)
        asked = expected_ids(config, source, features, num_ranks=run.ranks.num_ranks)
        for row in plan_rows(plans, unique_ids=asked):
            facts.setdefault("plan", {})[f"rank {row['rank']} {row['table']}"] = (
                f"{row['rows']} rows  {row['MiB']} MiB  {row['traffic MiB/step']} MiB/step"
            )
    return facts


def _counted(run: Run, source: SequenceSource, lengths: IntArray) -> dict[str, object]:
    """How much there is; of a log without what its rows repeat: a user has one in every window with own events."""
    items = f"{len(source.items.ids):,}"
    if run.log is None:
        return {"users": f"{len(lengths):,}", "items": items, "events": f"{int(lengths.sum()):,}"}
    windows = [run.log.source.entry(number) for number in range(run.log.batches.num_windows)]
    learnt = sum(window.targets for window in windows)
    return {
        "rows": f"{len(lengths):,} in {len(windows):,} windows, one for each user with events there",
        "items": items,
        "events": f"{sum(window.events for window in windows):,}, {learnt:,} of them to be learnt",
    }


def rows_in_words(embedding: ShardedEmbedding) -> str:
    """How rows travel, and whether once a rank or once a node."""
    if (stages := embedding.stages) is None:
        return describe_transport(embedding.transport)
    between, inside = describe_transport(stages.between), describe_transport(stages.inside)
    count = stages.groups.num_nodes
    return f"once a node, {count} nodes of {stages.inside.num_ranks}: between them {between}; inside {inside}"


def _may_read_action(run: Run, config: Config) -> bool:
    """Whether the head asks for actions, or an encoder from outside may."""
    ships = find("encoder", config.model.kind).ships
    return not ships or "action" in run.state.model.head.needs.columns


def features_in_words(config: Config, features: BatchFeatures) -> str:
    """Which features a model reads, and where they go."""
    of_items = [each.name for each in item_features(features.schema) if each.name != "item"]
    told = (
        [f"{', '.join(of_items)} in the vectors of items"] if of_items and config.items.kind == "ids" else []
    )
    places = {"join": "joined to events", "front": "in front", "after": "behind their events"}
    for place, words in places.items():
        names = [each.name for each in token_features(config, features.schema) if each.place == place]
        told += [f"{', '.join(names)} {words}"] if names else []
    read = {"item", "time", *of_items, *(each.name for each in token_features(config, features.schema))}
    left = [each for each in features.schema if each.name not in read]
    if config.tokens.join == "towers":
        members = {name for each in features.schema.crosses for name in each.cross}
        inside = [each.name for each in left if each.name in members and each.name != "user"]
        told += [f"{', '.join(inside)} in crosses alone"] if inside else []
    told += [f"{each.name} not read (a time)" for each in left if each.kind == "time"]
    told += [f"{each.name} not read (of requests: head.kind=tasks)" for each in left if each.of == "request"]
    told += ["ids of users not read (tables.user.rows makes them a feature)"] if _has_user(left) else []
    return "; ".join(told)


def tables_in_words(run: Run, config: Config, features: BatchFeatures) -> dict[str, object]:
    """Every table: its rows, who updates them, and which features have rows in it."""
    options, said = table_options(config, features.schema), dict[str, object]()
    for name, plan in run.state.embedding.plans.items():
        spec, own = plan.spec, options.get(name)
        size = f"{spec.num_rows * spec.dim * spec.dtype.itemsize / 2**20:,.3g} MiB"
        kind = own.section if own is not None else config.embedding
        where = "on every rank" if plan.replicated and run.ranks.num_ranks > 1 else ""
        of = f"of {', '.join(own.features)}" if own is not None and own.features != (name,) else ""
        words = [f"{spec.num_rows:,} x {spec.dim}", size, kind.id_map, kind.optimizer, where, of]
        said[name] = ", ".join(word for word in words if word)
    return said


def _kind(config: Config) -> str:
    """The encoder in words; how many layers an object has, it knows itself."""
    kind = config.model.kind
    return kind if kind.startswith(PYTHON) else f"{kind}, {config.model.layers} layers"


def _has_user(features: list[Feature]) -> bool:
    return any(each.name == "user" for each in features)


def _evaluated(run: Run) -> str:
    every = run.timetable.eval_every
    if run.log is not None:
        known = f"{run.log.batches.num_windows:,} windows" + (", then as they come" if run.log.follow else "")
        is_evaluated = run.timetable.due(run.log.batches.first_step(1))[0]
        return f"{known}, {'each evaluated before it is learnt' if is_evaluated else 'never evaluated'}"
    return f"evaluated every {every:,}" if every else "never evaluated"


def evaluation_in_words(run: Run, config: Config) -> dict[str, object]:
    """How the run is judged, for people."""
    protocol = run.evaluation.protocol
    seen = protocol.seen_words(config.eval.filter_seen)
    return {"test": protocol.words("test"), **({"seen items": seen} if seen else {})}


def origin() -> dict[str, str]:
    """Where a run comes from: machine, command, versions; for the top of its page."""
    return {
        "host": socket.gethostname(),
        "command": typed_command(),
        "freescale": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def items_in_words(config: Config, run: Run) -> str:
    """What item vectors are made of, for people."""
    assert run.state.model.items is not None
    size = sum(param.numel() for param in run.state.model.items.parameters())
    added = "rows of the table added" if config.items.add_ids else "no table"
    return f"{config.items.kind}, {size:,} parameters, {added}"
