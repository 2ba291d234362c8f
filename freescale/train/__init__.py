"""One run: loop, step, evaluation, checkpoints, export, progress."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.train.accounting import AccountedStep, Accounts
    from freescale.train.checkpoint import Checkpoints, read_meta
    from freescale.train.cuda_clock import CudaClock
    from freescale.train.evaluate import Evaluator, popularity_quality
    from freescale.train.events import JsonlSink, MetricSink, Progress, TensorBoardSink
    from freescale.train.expert_load import ExpertLoad, lengths_of_split_experts
    from freescale.train.export import load_export, write_export
    from freescale.train.extension import StepExtension
    from freescale.train.id_report import IdReport
    from freescale.train.item_vectors import ContentInput, EncodedItems, IdItems, ItemEncoder, TextInput
    from freescale.train.learning_rate import lr_factor
    from freescale.train.loop import take_steps, train
    from freescale.train.owned_parameters import OwnedParameters
    from freescale.train.progress import TerminalSink
    from freescale.train.rebalance import Rebalancer
    from freescale.train.reports import write_step
    from freescale.train.run import Run, RunState, Timetable, due_at
    from freescale.train.run_evaluation import Evaluation
    from freescale.train.run_lock import sole_run
    from freescale.train.run_state import load_run
    from freescale.train.step import TrainStep
else:
    __getattr__, __dir__ = open_door(__name__)
