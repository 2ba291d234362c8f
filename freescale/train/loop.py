"""train(): the story of one run, from its first or its last saved step to the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale.balance import StepPlan
from freescale.comm.world import from_first, gather
from freescale.errors import DamagedCheckpointError, Preempted
from freescale.kernels.runtime import gemm_warmup
from freescale.pipeline import LOOK_AHEAD, ReadyBatch, Schedule, naming_lost_workers
from freescale.trace import stage, total
from freescale.train.gc_freeze import GcFreeze
from freescale.train.log.compile_notice import telling_of_compilation
from freescale.train.log.reports import StepReports, is_beside, lag_of, open_report_channel
from freescale.train.quality.evaluate import GivenUpError
from freescale.train.run import Run
from freescale.train.state.resume import resume
from freescale.train.state.run_state import load_run, report_checkpoint, run_tensors, save
from freescale.train.state.saved import step_of
from freescale.train.state.weight_check import check_weights

_LESS = 0.3
"""Of all batches: a rank that replayed so many fewer than rank 0 is told of."""


@dataclass
class Covered:
    """How far a run has come, and what it learnt from on the way.

    Args:
        step: steps behind it, those before a resume included.
        tokens: of all ranks, since it started or resumed.
        samples: the same.
        started: when that was.
    """

    step: int
    tokens: int = 0
    samples: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, plan: StepPlan) -> None:
        """One more step."""
        self.step = plan.step + 1
        self.tokens += plan.global_tokens
        self.samples += plan.global_samples

    def speed(self, run: Run) -> dict[str, Any]:
        """How long it took, how fast it was and what would make it faster, for the summary."""
        seconds = time.monotonic() - self.started
        speed: dict[str, Any] = {"seconds": seconds}
        if self.tokens:
            speed |= {"tokens_per_s": self.tokens / seconds, "samples_per_s": self.samples / seconds}
        if run.accounts.totals:
            speed["bubble"] = total(run.accounts.totals).bubble
        if run.accounts.advice:
            speed["advice"] = run.accounts.advice
        return speed


def train(run: Run, *, resume_from: Path | None = None, first_step: int = 0) -> dict[str, Any]:
    """Train to the end, evaluate the best state on the test targets, and return the summary.

    Told to stop, all ranks save after the same step, and Preempted is raised.

    Args:
        run: what to train.
        resume_from: the checkpoint to start from, if any.
        first_step: without one, how many steps `resume` has brought back.
    """
    run.checkpoints.open()
    covered = Covered(resume(run, [resume_from]).step if resume_from else first_step)
    run.checkpoints.forget_after(covered.step)
    run.checkpoints.reserve(run_tensors(run))
    run.stop.wait_for_a_step()
    reports = reports_of(run)
    learn(run, covered, reports)
    while is_at_the_end_of_the_log(run, covered.step) and more_data(run, covered.step):
        learn(run, covered, reports)
    if run.stop.last_step == covered.step:
        run.ranks.barrier()  # nobody leaves before all have saved
        raise stopped(run, covered.step)
    status = "finished" if covered.tokens else "was already complete"
    return {"status": status, **finish(run, covered.step, speed=covered.speed(run))}


def learn(run: Run, covered: Covered, reports: StepReports) -> None:
    """Take all steps that are known of, from where the run stands."""
    if run.evaluation.due(covered.step):
        catch_up(run, covered.step)
    if not run.evaluation.out_of_patience:
        with (
            run.open_schedule(covered.step) as schedule,
            steady_state(run) as loaded,
            run.ranks.watch.telling_failures(),  # before the schedule is closed, which waits for other ranks
            naming_lost_workers(),
        ):
            for ready, seconds in steps_of(run, schedule, reports, loaded, first_step=covered.step):
                covered.add(ready.plan)
                rebalance(run, covered.step)
                maybe_switch(run, covered.step, 1000 * seconds)
                report_checkpoint(run, run.checkpoints.finished())
                agree_to_stop(run, covered.step, reports)
                if run.log is not None:
                    run.log.tell(covered.step, run.progress)
                if evaluate_and_save(run, covered.step, schedule, reports):
                    break
            reports.flush()
            run.train_step.settle()
            run.accounts.pause()
            tell_stories(run, covered.step)
    report_checkpoint(run, run.checkpoints.wait())


def tell_stories(run: Run, step: int) -> None:
    """What kept steps from being replayed, on this rank and on those where it was much; what had no room; watches."""
    own = run.train_step.captured_share(), run.train_step.capture_story()
    stories = gather(own, group=run.ranks.control, what="tell stories")
    told = [stories[0][1], run.train_step.postpone_story(), run.accounts.watch_story]
    for rank, (share, story) in enumerate(stories):
        if share is not None and share < (stories[0][0] or 0) - _LESS:
            told.append(f"rank {rank}: {story}")
    for text in told:
        if text is not None:
            run.progress.notice(step, text)


def is_at_the_end_of_the_log(run: Run, step: int) -> bool:
    """Whether the data may go on where all known steps are taken."""
    return run.log is not None and run.stop.last_step is None and step == run.log.batches.num_steps


def more_data(run: Run, step: int) -> bool:
    """Wait for more windows, if the run is to follow its log."""
    assert run.log is not None
    with stage("wait for data", step=step):
        return run.log.wait_for_more(step, stop=run.stop, progress=run.progress)


def take_steps(run: Run, schedule: Schedule) -> None:
    """All steps of a schedule from the first on, reported, and nothing between them: for those who measure steps."""
    reports = reports_of(run)
    with steady_state(run) as loaded:
        for _ in steps_of(run, schedule, reports, loaded, first_step=0):
            pass
        reports.flush()
        run.train_step.settle()
        run.accounts.pause()


def steps_of(
    run: Run, schedule: Schedule, reports: StepReports, loaded: GcFreeze, *, first_step: int
) -> Iterator[tuple[ReadyBatch, float]]:
    """Learn from one batch after the other; each with the seconds its step took."""
    run.accounts.begin(first_step + 1, last_step=run.timetable.total_steps)
    step = first_step
    try:
        for ready in timed_batches(schedule, first_step):
            step = ready.plan.step
            with stage("train", step=step + 1):
                result = run.train_step.run(ready, schedule)
            seconds = run.accounts.end_step()
            loaded.step_done()
            reports.add(ready, result, seconds=seconds)
            yield ready, seconds
            step += 1
    except torch.OutOfMemoryError as error:  # of what happens beside a step; its own is told by it
        raise run.train_step.too_full(step, error) from error


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


@contextmanager
def steady_state(run: Run) -> Iterator[GcFreeze]:
    """Steps inside are kept from what would make one of them much longer than the others, on one rank or another.

    What is compiled first makes some longer all the same, which is told.
    """
    told = telling_of_compilation(lambda text: run.progress.notice(0, text))
    with gemm_warmup(*run.usual_tokens), GcFreeze() as loaded, told:
        yield loaded


def reports_of(run: Run) -> StepReports:
    """What reports the steps of a run."""
    return StepReports(
        ranks=run.ranks,
        check=run.train_step.check,
        extensions=run.train_step.extensions,
        progress=run.progress,
        accounts=run.accounts,
        channel=open_report_channel(run.ranks, kind=run.train_step.transport),
        lag=lag_of(run.ranks),
        stop=run.stop,
        beside=is_beside(run.ranks, run.train_step.extensions),
        tables=[name for name, plan in run.state.embedding.plans.items() if not plan.replicated],
    )


def rebalance(run: Run, step: int) -> None:
    """Where it is due, agree on what was measured; later steps are planned with it."""
    run.rebalancer.observe(run.train_step.timer.take())
    decided = run.rebalancer.agree(step)
    if decided is not None:
        run.progress.balance(step, decided)


def maybe_switch(run: Run, step: int, step_ms: float) -> None:
    """Where it is due, agree on whether hiding embedding traffic pays, and how much there is to compute beside it."""
    run.switch.observe(step - 1, step_ms)
    decided = run.switch.agree(step - 1)
    if decided is not None:
        run.progress.pipeline(step, decided)
    if run.postponing is not None:
        run.postponing.observe(step - 1, step_ms)
        share = run.postponing.agree(step - 1)
        if share is not None:
            run.progress.postpone(step, {**share, "kept_mb": run.train_step.postponed_mb()})


def agree_to_stop(run: Run, step: int, reports: StepReports) -> None:
    """Once any rank was told to stop: all do after this step, or where a map that learns has not looked past it."""
    if reports.told_to_stop and run.stop.last_step is None:
        ahead = LOOK_AHEAD if run.state.learns_ids else 0
        run.stop.last_step = min(step + ahead, run.timetable.total_steps)


def evaluate_and_save(run: Run, step: int, schedule: Schedule, reports: StepReports) -> bool:
    """Evaluate and write a checkpoint where one is due, or only save where the run stops; True if it ends here."""
    evaluates, saves = run.timetable.due(step)
    stops = run.stop.last_step == step
    improved = False
    if evaluates or saves or stops:
        stand_still(run, step, schedule, reports)
        # No id has been looked at past a step at which something is due: it is as good a place to stop.
        stops = stops or reports.told_to_stop
    if evaluates:
        with stage("evaluate", step=step):
            improved = validate(run, step, put_off=stops)
        stops = stops or run.evaluation.pending
    if saves or improved or stops:
        with stage("save a checkpoint", step=step):
            save(run, step, best=improved)
    if stops:
        run.stop.last_step = step
    elif step != run.timetable.total_steps:
        run.accounts.begin(step + 1, last_step=run.timetable.total_steps)
    return stops or (evaluates and run.evaluation.out_of_patience)


def validate(run: Run, step: int, *, put_off: bool = False) -> bool:
    """Evaluate, unless the run is to stop: it catches up when it goes on. True if this is the best state so far."""
    return run.evaluation.validate(
        step, run.progress, give_up=lambda: put_off or run.stop.anywhere(run.ranks)
    )


def catch_up(run: Run, step: int) -> None:
    """The evaluation that was put off when the run was told to stop."""
    with stage("evaluate", step=step):
        improved = validate(run, step)
    if run.evaluation.pending:
        raise stopped(run, step)
    if improved:
        save(run, step, best=True)


def stopped(run: Run, step: int) -> Preempted:
    """What a run says that was told to stop."""
    saved = run.checkpoints.latest()
    run.progress.stopped(step, saved)
    what = "" if saved is None else f", saved {saved}"
    return Preempted(f"stopped on request at step {step}{what}; the same command goes on from there")


def stand_still(run: Run, step: int, schedule: Schedule, reports: StepReports) -> None:
    """Bring everything under way to its end, and look at the whole: before an evaluation or a checkpoint."""
    reports.flush()  # a loss that is no number ends the run before anything is saved
    schedule.flush()
    run.train_step.settle()
    run.accounts.pause()  # evaluations and checkpoints are no part of a step's time
    with stage("look at the weights", step=step):
        check_weights(run, step)
    if run.accounts.totals:
        run.progress.ranks(step, run.accounts.totals, clock_error=run.accounts.clock_error)
    for extension in run.state.extensions:
        run.progress.picture(step, extension.name, extension.picture())


def load_best(run: Run, best: Path, step: int) -> int:
    """The best state, and its step; that of the end where the best one is damaged, and the end was saved."""
    tested = int(run.evaluation.best["step"])
    try:
        load_run(run, best)
    except DamagedCheckpointError as error:
        last = from_first(run.checkpoints.latest, ranks=run.ranks, what="find the last checkpoint")
        if last is None or last == best or step_of(last) != step:
            raise
        load_run(run, last)  # what was read until then is of neither
        run.progress.notice(step, f"{error.what}; the state of the end is tested instead")
        return step
    return tested


def finish(run: Run, step: int, *, speed: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the best state on the test targets, if the run is evaluated at all, and close the books."""
    best, tested = from_first(run.checkpoints.best, ranks=run.ranks, what="find the best checkpoint"), step
    books = {"steps": step, **speed, "checkpoint": None if best is None else str(best)}
    if (why := run.evaluation.why_over) is not None and step < run.timetable.total_steps:
        books["ended"] = why
    if not run.timetable.eval_every:
        return books
    if best is not None and run.evaluation.best.get("step") not in (None, step):
        tested = load_best(run, best, step)
        if tested == step:
            books["checkpoint"] = str(run.checkpoints.latest())
    with stage("evaluate", step=step):
        try:
            quality = run.evaluation.final(
                step, run.progress, tested=tested, give_up=lambda: run.stop.anywhere(run.ranks)
            )
        except GivenUpError:
            raise stopped(run, step) from None
    return {**books, **quality}
