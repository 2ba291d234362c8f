"""train(): the story of one run, from its first or its last saved step to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.comm.ranks import Ranks
from freescale.data.examples import Examples
from freescale.embedding.id_map import IdMap
from freescale.embedding.sharded import ShardedEmbedding
from freescale.model.recommender import Recommender
from freescale.pipeline.schedule import PlainSchedule, ReadyBatch
from freescale.trace.spans import stage
from freescale.train.checkpoint import Checkpoints, load_tensors, read_meta
from freescale.train.evaluate import Evaluator
from freescale.train.events import Progress
from freescale.train.id_report import IdReport
from freescale.train.rebalance import Rebalancer
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
        train_step: learns from one batch.
        rebalancer: agrees on costs and speeds measured in the run.
        open_schedule: (first step) -> batches with their rows, from there to the end.
        evaluator: ranks items for users.
        valid: validation examples.
        test: test examples.
        checkpoints: where state is kept.
        progress: where events go.
        total_steps: length of the run.
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
    train_step: TrainStep
    rebalancer: Rebalancer
    open_schedule: Callable[[int], PlainSchedule]
    evaluator: Evaluator
    valid: Examples
    test: Examples
    checkpoints: Checkpoints
    progress: Progress
    total_steps: int
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
    step = first_step
    if not out_of_patience(run):
        schedule = run.open_schedule(first_step)
        for ready, clock in timed(schedule):
            with stage("train", step=ready.plan.step + 1):
                result = run.train_step.run(ready, schedule)
            step = ready.plan.step + 1
            report_step(run, ready, result.loss, result.grad_norm, clock())
            rebalance(run, step)
            tokens, samples = tokens + ready.plan.global_tokens, samples + ready.plan.global_samples
            report_checkpoint(run, run.checkpoints.finished())
            if evaluate_and_save(run, step, schedule) and out_of_patience(run):
                break
    report_checkpoint(run, run.checkpoints.settle())
    seconds = time.monotonic() - started
    speed = {"tokens_per_s": tokens / seconds, "samples_per_s": samples / seconds} if tokens else {}
    status = "finished" if tokens else "was already complete"
    return {"status": status, **finish(run, step, seconds=seconds, **speed)}


def timed(schedule: PlainSchedule) -> Iterator[tuple[ReadyBatch, Callable[[], float]]]:
    """Batches, each with a clock that gives the milliseconds since the last batch was done."""
    last = time.perf_counter()

    def clock() -> float:
        nonlocal last
        now = time.perf_counter()
        elapsed, last = now - last, now
        return 1000 * elapsed

    batches = iter(schedule)
    while True:
        with stage("load and look up"):
            ready = next(batches, None)
        if ready is None:
            return
        yield ready, clock


def report_step(run: Run, ready: ReadyBatch, loss: float, grad_norm: float | None, step_ms: float) -> None:
    """One line for this step. The loss is summed over the ranks, so every line is that of the global batch."""
    plan = ready.plan
    mine = torch.cat([torch.tensor([loss], dtype=torch.float64), run.id_report.counts(plan.step)])
    total, *_ = summed = run.ranks.sum_on_cpu(mine)
    run.progress.step(
        plan.step + 1,
        loss=float(total),
        step_ms=step_ms,
        tokens_per_s=1000 * plan.global_tokens / step_ms,
        imbalance=plan.imbalance,
        bound=plan.bound,
        epoch=plan.epoch,
        plan=plan.plan_hash,
        **({} if grad_norm is None else {"grad_norm": grad_norm}),
        **run.id_report.step_fields(summed[1:]),
    )


def rebalance(run: Run, step: int) -> None:
    """Where it is due, agree on what was measured; later steps are planned with it."""
    run.rebalancer.observe(run.train_step.timer.take())
    decided = run.rebalancer.agree(step)
    if decided is not None:
        run.progress.balance(step, decided)


def evaluate_and_save(run: Run, step: int, schedule: PlainSchedule) -> bool:
    """Evaluate and write a checkpoint where one is due; True if there was an evaluation."""
    last = step == run.total_steps
    evaluates = last or step % run.eval_every == 0
    saves = last or (evaluates if run.checkpoint_every is None else step % run.checkpoint_every == 0)
    improved = False
    if evaluates or saves:
        schedule.flush()
        run.progress.ids(step, run.id_report.picture())
    if evaluates:
        with stage("evaluate", step=step):
            improved = evaluate(run, step)
    if saves or improved:
        with stage("save a checkpoint", step=step):
            save(run, step, best=improved)
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
    tensors = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    names = {param: name for name, param in run.model.named_parameters()}
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            state = adam_state(run.optimizer, param)
            tensors |= {f"optimizer.{names[param]}.{part}": value for part, value in state.items()}
    tensors |= {f"table.{name}": value for name, value in run.embedding.state_dict().items()}
    return tensors | {f"ids.{name}": value for name, value in run.id_map.state_dict().items()}


def load_run(run: Run, path: Path) -> None:
    """Fill every tensor of the run from a checkpoint."""
    load_tensors(path, run_tensors(run), ranks=run.ranks)
    run.id_map.restored()


def adam_state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made now if the first step has not been taken yet."""
    state = optimizer.state[param]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    return dict(state)
