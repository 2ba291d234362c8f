"""train(): the story of one run, from its first or its last saved step to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.comm.world import Ranks
from freescale.data import Examples
from freescale.embedding import IdMap, ShardedEmbedding
from freescale.kernels.runtime import gemm_warmup
from freescale.model import Recommender
from freescale.pipeline import ReadyBatch, Schedule, Switch
from freescale.trace import stage, total
from freescale.train.accounting import Accounts
from freescale.train.checkpoint import Checkpoints, load_tensors, read_meta
from freescale.train.evaluate import Evaluator
from freescale.train.events import Progress
from freescale.train.expert_load import ExpertLoad
from freescale.train.gc_freeze import GcFreeze
from freescale.train.id_report import IdReport
from freescale.train.owned_experts import OwnedExperts
from freescale.train.rebalance import Rebalancer
from freescale.train.reports import StepReports, lag_of, open_report_channel
from freescale.train.step import TrainStep


@dataclass(kw_only=True)
class Run:
    """The parts of a run, put together by `assembly.build_run`.

    Args:
        ranks: who takes part.
        model: the dense part.
        optimizer: of the dense part.
        embedding: the tables.
        id_map: raw ids to rows.
        id_report: what happened to ids.
        expert_load: balances experts and tells how evenly they are used.
        owned: parameters that this rank holds a part of.
        train_step: learns from one batch.
        rebalancer: agrees on costs and speeds measured in the run.
        switch: agrees on whether hiding traffic pays.
        open_schedule: (first step) -> batches with their rows, from there to the end.
        evaluator: ranks items for users.
        valid: validation examples.
        test: test examples.
        checkpoints: where state is kept.
        progress: where events go.
        accounts: where step lines wait until their time is accounted for.
        total_steps: length of the run.
        usual_tokens: fewest and most of a batch of this rank, nearly always.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints; None: with every evaluation.
        metric: what decides the best checkpoint.
        patience: evaluations without a better one before stopping.
        max_eval_users: users of the evaluations during training.
        popularity: metrics of the popularity baseline on the validation and test targets.
        recipe: the configuration, kept in checkpoints.
    """

    ranks: Ranks
    model: Recommender
    optimizer: torch.optim.Optimizer
    embedding: ShardedEmbedding
    id_map: IdMap
    id_report: IdReport
    expert_load: ExpertLoad
    owned: OwnedExperts
    train_step: TrainStep
    rebalancer: Rebalancer
    switch: Switch
    open_schedule: Callable[[int], Schedule]
    evaluator: Evaluator
    valid: Examples
    test: Examples
    checkpoints: Checkpoints
    progress: Progress
    accounts: Accounts
    total_steps: int
    usual_tokens: tuple[int, int]
    eval_every: int
    checkpoint_every: int | None
    metric: str
    patience: int | None
    max_eval_users: int | None
    protocol: str
    popularity: Mapping[str, Mapping[str, float]]
    recipe: Mapping[str, Any]
    best: dict[str, Any] = field(default_factory=dict)
    evaluations_since_best: int = 0


def train(run: Run, *, resume_from: Path | None) -> dict[str, Any]:
    """Train to the end, evaluate the best state on the test targets, and return the summary."""
    first_step = restore(run, resume_from) if resume_from else 0
    run.checkpoints.forget_after(first_step)
    started, tokens, samples = time.monotonic(), 0, 0
    step, reports = first_step, reports_of(run)
    if not out_of_patience(run):
        with run.open_schedule(first_step) as schedule, steady_state(run) as loaded:
            run.accounts.begin(first_step + 1)
            for ready in timed_batches(schedule, first_step):
                step = ready.plan.step + 1
                with stage("train", step=step):
                    result = run.train_step.run(ready, schedule)
                seconds = run.accounts.end_step()
                loaded.step_done()
                reports.add(ready, result, seconds=seconds)
                rebalance(run, step)
                maybe_switch(run, step, 1000 * seconds)
                tokens, samples = tokens + ready.plan.global_tokens, samples + ready.plan.global_samples
                report_checkpoint(run, run.checkpoints.finished())
                if evaluate_and_save(run, step, schedule, reports) and out_of_patience(run):
                    break
            reports.flush()
            run.accounts.pause()
    report_checkpoint(run, run.checkpoints.wait_on_all_ranks())
    seconds = time.monotonic() - started
    speed = {"tokens_per_s": tokens / seconds, "samples_per_s": samples / seconds} if tokens else {}
    if run.accounts.totals:
        speed["bubble"] = total(run.accounts.totals).bubble
    status = "finished" if tokens else "was already complete"
    return {"status": status, **finish(run, step, seconds=seconds, **speed)}


@contextmanager
def steady_state(run: Run) -> Iterator[GcFreeze]:
    """Steps inside are kept from what would make one of them much longer than the others, on one rank or another."""
    with gemm_warmup(*run.usual_tokens), GcFreeze() as loaded:
        yield loaded


def reports_of(run: Run) -> StepReports:
    """What reports the steps of a run."""
    return StepReports(
        ranks=run.ranks,
        check=run.train_step.check,
        id_report=run.id_report,
        expert_load=run.expert_load,
        progress=run.progress,
        accounts=run.accounts,
        channel=open_report_channel(run.ranks, kind=run.train_step.transport),
        lag=lag_of(run.ranks, run.expert_load),
    )


def take_steps(run: Run, schedule: Schedule) -> None:
    """All steps of a schedule from the first on, reported, and nothing between them: for those who measure steps."""
    reports = reports_of(run)
    with steady_state(run) as loaded:
        run.accounts.begin(1)
        for ready in timed_batches(schedule, 0):
            result = run.train_step.run(ready, schedule)
            seconds = run.accounts.end_step()
            loaded.step_done()
            reports.add(ready, result, seconds=seconds)
        reports.flush()
        run.accounts.pause()


def timed_batches(schedule: Schedule, first_step: int) -> Iterator[ReadyBatch]:
    """Batches, with a name for the time spent on getting them."""
    batches, step = iter(schedule), first_step
    while True:
        step += 1
        with stage("load and look up", step=step):
            ready = next(batches, None)
        if ready is None:
            return
        yield ready


def rebalance(run: Run, step: int) -> None:
    """Where it is due, agree on what was measured; later steps are planned with it."""
    run.rebalancer.observe(run.train_step.timer.take())
    decided = run.rebalancer.agree(step)
    if decided is not None:
        run.progress.balance(step, decided)


def maybe_switch(run: Run, step: int, step_ms: float) -> None:
    """Where it is due, agree on whether hiding embedding traffic pays."""
    run.switch.observe(step - 1, step_ms)
    decided = run.switch.agree(step - 1)
    if decided is not None:
        run.progress.pipeline(step, decided)


def due_at(step: int, *, every: int, save_every: int | None, last: bool = False) -> tuple[bool, bool]:
    """Whether an evaluation and a checkpoint are due after a step (from 1); without `save_every` they go together."""
    evaluates = last or step % every == 0
    return evaluates, last or (evaluates if save_every is None else step % save_every == 0)


def evaluate_and_save(run: Run, step: int, schedule: Schedule, reports: StepReports) -> bool:
    """Evaluate and write a checkpoint where one is due; True if there was an evaluation."""
    last = step == run.total_steps
    evaluates, saves = due_at(step, every=run.eval_every, save_every=run.checkpoint_every, last=last)
    improved = False
    if evaluates or saves:
        reports.flush()  # a loss that is no number ends the run before anything is saved
        schedule.flush()
        run.accounts.pause()  # evaluations and checkpoints are no part of a step's time
        if run.accounts.totals:
            run.progress.ranks(step, run.accounts.totals)
        run.progress.ids(step, run.id_report.picture())
        run.progress.experts(step, run.expert_load.picture())
    if evaluates:
        with stage("evaluate", step=step):
            improved = evaluate(run, step)
    if saves or improved:
        with stage("save a checkpoint", step=step):
            save(run, step, best=improved)
    if not last:
        run.accounts.begin(step + 1)
    return evaluates


def evaluate(run: Run, step: int) -> bool:
    """Evaluate on the validation targets; True if this is the best state so far."""
    metrics = run.evaluator.run(run.valid, max_users=run.max_eval_users)
    run.progress.evaluation(
        step, metrics, popularity=run.popularity.get("valid"), protocol=run.protocol, split="valid"
    )
    value = metrics.get(run.metric)
    improved = value is not None and value > run.best.get("value", float("-inf"))
    if improved:
        run.best = {"metric": run.metric, "value": value, "step": step}
    run.evaluations_since_best = 0 if improved else run.evaluations_since_best + 1
    return improved


def save(run: Run, step: int, *, best: bool) -> None:
    """Begin to write a checkpoint of everything the rest of the run depends on."""
    meta = {
        "recipe": dict(run.recipe),
        "best": run.best,
        "evaluations_since_best": run.evaluations_since_best,
        "num_ranks": run.ranks.num_ranks,
        "balance_decisions": run.rebalancer.decisions.state(),
        "pipeline_decisions": run.switch.state(),
    }
    report_checkpoint(run, run.checkpoints.wait())
    run.checkpoints.save(step, run_tensors(run), meta, best=best)


def report_checkpoint(run: Run, path: Path | None) -> None:
    """Tell of a checkpoint once it is on disk."""
    if path is not None:
        run.progress.checkpoint(int(path.name.removeprefix("step-")), path)


def restore(run: Run, path: Path) -> int:
    """Bring a checkpoint back; returns the number of steps it has behind it."""
    meta = read_meta(path)
    load_run(run, path)
    run.best = dict(meta["best"])
    run.evaluations_since_best = int(meta["evaluations_since_best"])
    run.rebalancer.decisions.load_state(meta["balance_decisions"])
    run.switch.load_state(meta.get("pipeline_decisions", []))
    return int(meta["step"])


def out_of_patience(run: Run) -> bool:
    """Whether the last evaluations brought nothing better."""
    return run.patience is not None and run.evaluations_since_best >= run.patience


def finish(run: Run, step: int, **speed: float) -> dict[str, Any]:
    """Evaluate the best state on the test targets and close the books."""
    best = run.checkpoints.best()
    if best is not None and run.best.get("step") not in (None, step):
        read_meta(best)
        load_run(run, best)
    with stage("evaluate", step=step):
        metrics = run.evaluator.run(run.test)
    popularity = run.popularity.get("test")
    run.progress.evaluation(step, metrics, popularity=popularity, protocol=run.protocol, split="test")
    shown = "hr@10" if "hr@10" in metrics else "auc"
    return {
        "steps": step,
        **speed,
        "best_metric": f"test {shown}",
        "best_value": metrics[shown],
        "best_step": run.best.get("step", step),
        "popularity": None if popularity is None else popularity.get(shown),
        "test": metrics,
        "checkpoint": None if best is None else str(best),
    }


def run_tensors(run: Run) -> dict[str, Tensor]:
    """Every tensor a resumed run needs, by a flat name. There is no random state: it follows from (seed, step)."""
    whole = run.owned.whole
    tensors = {f"model.{name}": whole(name, value) for name, value in run.model.state_dict().items()}
    names = {param: name for name, param in run.model.named_parameters()}
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            name, state = names[param], adam_state(run.optimizer, param, fused=bool(group["fused"]))
            tensors |= {f"optimizer.{name}.{part}": whole(name, value) for part, value in state.items()}
    tensors |= {f"table.{name}": value for name, value in run.embedding.state_dict().items()}
    return tensors | {f"ids.{name}": value for name, value in run.id_map.state_dict().items()}


def load_run(run: Run, path: Path) -> None:
    """Fill every tensor of the run from a checkpoint."""
    load_tensors(path, run_tensors(run), ranks=run.ranks)
    run.id_map.restored()


def adam_state(optimizer: torch.optim.Optimizer, param: Tensor, *, fused: bool) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made now if the first step has not been taken yet.

    A fused optimizer counts steps where the parameter is, any other on the CPU; checkpoints fit both.
    """
    state = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), device=param.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return dict(state)
