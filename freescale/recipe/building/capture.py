"""Whether steps are recorded as CUDA graphs (run.capture), and what does it; why not, in words, where they are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freescale.balance import BalancedSampler, StepPlan
    from freescale.comm.world import Ranks
    from freescale.data import Examples, TokenRule
    from freescale.embedding import EmbeddingTable
    from freescale.model import Recommender
    from freescale.pipeline import Padder, PaddingSizes, PairLimit, RowCounts
    from freescale.recipe.building.run_tables import RunTables
    from freescale.recipe.config import Config
    from freescale.train import Progress, Recorder


@dataclass(frozen=True)
class Capture:
    """What captured steps are made of; nothing where steps are computed as usual.

    Args:
        padder: pads batches.
        recorder: records their steps.
        tables: whose rows the steps read and update by themselves; None: rows are looked up and updated around them.
    """

    padder: Padder | None = None
    recorder: Recorder | None = None
    tables: Mapping[str, EmbeddingTable] | None = None


def build_capture(
    config: Config,
    ranks: Ranks,
    progress: Progress,
    *,
    model: Recommender,
    tables: RunTables,
    lr_factor: Callable[[int], float],
    sampler: BalancedSampler,
    examples: Examples,
) -> Capture:
    """What pads batches and what records their steps; neither where steps cannot be recorded, which is told once."""
    import torch

    from freescale.train import Recorder

    def tell(reason: str) -> None:
        progress.notice(0, f"steps computed as usual, not replayed as CUDA graphs: {reason}")

    def remark(text: str) -> None:
        progress.notice(0, text)

    if config.run.capture == "off" or ranks.device.type != "cuda":
        return Capture()
    usual_tokens = sampler.usual_tokens(parts=config.optim.accumulate)[1]
    reason = why_not(config, model, tables, usual_tokens=usual_tokens)
    if reason is not None:
        tell(reason)
        return Capture()
    sizes = foreseen_sizes(sampler, examples, tables, model=model, config=config)
    # Plans differ from rank to rank; whether batches are padded must not.
    if ranks.sum_on_cpu(torch.tensor([float(sizes is None)]), what="agree on CUDA graphs"):
        tell("batches have more pairs of tokens than gradients are kept for")
        return Capture()
    recorder = Recorder(ranks.device, tell=tell, remark=remark)
    return assemble_capture(
        config,
        recorder,
        ranks=ranks,
        model=model,
        tables=tables,
        examples=examples,
        lr_factor=lr_factor,
        sizes=sizes,
    )


def foreseen_sizes(
    sampler: BalancedSampler,
    examples: Examples,
    tables: RunTables,
    *,
    model: Recommender,
    config: Config,
) -> PaddingSizes | None:
    """The sizes that batches will have, by the plan of the first epoch; the largest of its batches is read.

    None where they have more pairs of tokens than lists of fixed sizes have room for. A log grows: which windows there
    are when a run starts must not decide how its sums are rounded.
    """
    from freescale.balance import WindowBatches
    from freescale.pipeline import PaddingSizes, RowCounts, RowFinder, foresee_sizes

    num_parts, limit = config.optim.accumulate, _pair_limit(config, model)
    if isinstance(sampler.batches, WindowBatches):
        usual, samples = sampler.usual_tokens(parts=num_parts)[1], config.data.global_batch
        return PaddingSizes() if limit.hold(tokens=usual, samples=samples) else None
    finder = RowFinder.of(tables.embedding, tables.id_map, tables.features)

    def rows_of(plan: StepPlan) -> RowCounts:
        batch = examples.batch(plan.rows, step=plan.step)
        found = finder.find(batch, step=plan.step)
        counts = {name: len(rows) for name, rows in found.unique.items()}
        return RowCounts(counts, len(next(iter(batch.items.values()), ())))

    return foresee_sizes(
        sampler,
        rows_of=rows_of,
        table_rows=_table_rows(tables),
        num_items=_num_items(tables, examples),
        num_parts=num_parts,
        pairs=limit,
    )


def _table_rows(tables: RunTables) -> dict[str, int]:
    return {name: plan.spec.num_rows for name, plan in tables.embedding.plans.items()}


def _num_items(tables: RunTables, examples: Examples) -> int:
    """Of the catalogue, where batches say something of items."""
    return 0 if tables.features is None else len(examples.source.items.ids)


def assemble_capture(
    config: Config,
    recorder: Recorder,
    *,
    ranks: Ranks,
    model: Recommender,
    tables: RunTables,
    examples: Examples,
    lr_factor: Callable[[int], float],
    sizes: PaddingSizes | None = None,
) -> Capture:
    """The parts, for a run whose steps can be recorded."""
    from freescale.kernels.dropout import key_of_step
    from freescale.pipeline import Padder, PaddingSizes, pack_numbers

    held, seed = tables.embedding.tables, config.run.seed

    def numbers_of(step: int) -> Any:
        factor = lr_factor(step)
        rate = config.embedding.lr * factor
        return pack_numbers(
            dropout_key=key_of_step(seed, step),
            dense_lr=config.optim.lr * factor,
            rows=[table.step_numbers(lr=rate, step=step + 1) for table in held.values()],
        )

    padder = Padder(
        ranks.device,
        longest=config.data.max_length,
        table_rows=_table_rows(tables),
        numbers_of=numbers_of,
        sizes=sizes or PaddingSizes(),
        num_parts=config.optim.accumulate,
        num_items=_num_items(tables, examples),
        rule=_token_rule(model),
        unread=_unread(model, tables, examples),
    )
    # Rows that travel or serve several micro-batches, and tables whose update is not one kernel, are dealt with around
    # the recorded part of a step.
    alone = ranks.num_ranks == 1 and config.optim.accumulate == 1
    fused = all(table.not_fused is None for table in held.values())
    inside = alone and (fused or ranks.device.type == "cpu")
    return Capture(padder, recorder, held if inside else None)


def _unread(model: Recommender, tables: RunTables, examples: Examples) -> frozenset[str]:
    """Features of batches that no part of the model reads: ids that have rows, and what is said of the next event."""
    from freescale.model import is_ours
    from freescale.pipeline import RAW_IDS

    if tables.features is None or examples.features is None:
        return RAW_IDS
    ids = {column.name for column in tables.features.columns}
    if not (is_ours(model.encoder) and is_ours(model.head)):
        return RAW_IDS | ids  # who knows what they look at
    return RAW_IDS | ids | examples.features.of_next_events()


def _pair_limit(config: Config, model: Recommender) -> PairLimit:
    """For how many pairs score gradients are kept, by lists of fixed sizes; any number where a model keeps none."""
    import torch

    from freescale.kernels import keeps_scores, most_kept_blocks
    from freescale.model import RelativeBias
    from freescale.pipeline import PairLimit

    tables = (each for each in model.modules() if isinstance(each, RelativeBias))
    learns_bias = any(len(list(each.parameters())) for each in tables)
    heads, itemsize = config.model.heads, getattr(torch, config.model.dtype).itemsize
    most = None
    if learns_bias or keeps_scores(width=config.model.dim // heads, itemsize=itemsize):
        most = most_kept_blocks(heads=heads, itemsize=itemsize)
    return PairLimit(most, longest=config.data.max_length, rule=_token_rule(model))


def _token_rule(model: Recommender) -> TokenRule | None:
    """How sequences grow by tokens of features; None: they do not."""
    return None if model.tokens is None or not model.tokens.extends else model.tokens.rule


def why_not(config: Config, model: Recommender, tables: RunTables, *, usual_tokens: int = 0) -> str | None:
    """The first reason why steps of a run are not recorded; None: they are. The same on all ranks."""
    from freescale.balance import MOST_REPLAYED_TOKENS
    from freescale.data import is_log
    from freescale.model import FeatureJoin, drawn_by_rank, moe_layers, takes_pads
    from freescale.recipe.building.plain_attention import plain_attention

    features = tables.features is not None
    reasons = {
        f"a batch has up to {usual_tokens:,} tokens, which keep a GPU busy while the host goes on": usual_tokens
        >= MOST_REPLAYED_TOKENS,
        "model.dtype=float64 is computed without fused kernels": config.model.dtype == "float64",
        "attention is computed in plain PyTorch": plain_attention(config, model, kind="cuda") is not None,
        "item vectors are computed (items.kind)": config.items.kind != "ids",
        "item vectors are made by towers (tokens.join=towers)": features
        and not isinstance(model.items, FeatureJoin),
        "data.path is a log, and older events have no loss": is_log(config.data.path),
        "rows are found on the GPU by a map that learns": tables.learns,
        f"model.mask={config.model.mask} hides more than what comes later": config.model.mask != "causal",
        f"experts are computed one by one (moe.backend={config.moe.backend})": config.ffn.kind == "moe"
        and config.moe.backend in ("eager", "reference"),
        "experts are spread over the ranks (moe.parallel)": any(
            layer.dispatch.is_split for _, layer in moe_layers(model)
        ),
        f"model.kind={config.model.kind} as it is built here takes no padded batches": not takes_pads(
            model.encoder
        ),
        f"head.kind={config.head.kind} takes no padded batches": not takes_pads(model.head),
        "a module draws from torch's random numbers; freescale.Dropout does not": bool(drawn_by_rank(model)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
