"""One run: loop, step, evaluation, checkpoints, progress."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.train.accounts.accounting import AccountedStep, Accounts
    from freescale.train.accounts.busy_meter import BusyMeter
    from freescale.train.accounts.cuda_clock import CudaClock
    from freescale.train.accounts.driver_counter import DriverCounter, open_nvml
    from freescale.train.accounts.kernel_watch import KernelWatch
    from freescale.train.accounts.stalls import Stalls
    from freescale.train.compute.flat_gradients import rows_of_items
    from freescale.train.compute.late_update import by_layer
    from freescale.train.compute.owned_parameters import OwnedParameters
    from freescale.train.compute.recorder import Recorder
    from freescale.train.compute.step import TrainStep
    from freescale.train.compute.update_if_due import update_only
    from freescale.train.extension import StepExtension
    from freescale.train.featured_items import FeaturedItems
    from freescale.train.growing_log import GrowingLog, WindowTimetable
    from freescale.train.item_vectors import ContentInput, EncodedItems, IdItems, ItemEncoder, TextInput
    from freescale.train.learning_rate import lr_factor
    from freescale.train.log.events import MetricSink, Progress
    from freescale.train.log.expert_load import ExpertLoad, lengths_of_split_experts
    from freescale.train.log.guest_sink import GuestSink
    from freescale.train.log.id_report import id_reports
    from freescale.train.log.mllog import MllogSink
    from freescale.train.log.progress import TerminalSink
    from freescale.train.log.reports import write_step
    from freescale.train.log.sinks import JsonlSink, TensorBoardSink
    from freescale.train.log.trackers import MlflowSink, WandbSink, default_place, open_tracker, replay
    from freescale.train.loop import take_steps, train
    from freescale.train.quality.baselines import popularity_quality, repeat_quality
    from freescale.train.quality.evaluate import Evaluator, asked_users
    from freescale.train.quality.full_ranking import Rule
    from freescale.train.quality.next_window import NextWindowEvaluation, NextWindowProtocol
    from freescale.train.quality.protocol import EvalProtocol
    from freescale.train.quality.run_evaluation import Evaluation, Judge, judged_event
    from freescale.train.rebalance import Rebalancer
    from freescale.train.run import Run, RunState, Timetable
    from freescale.train.state.checkpoint import Checkpoints
    from freescale.train.state.kept_facts import kept_facts
    from freescale.train.state.resume import Resumed, resume
    from freescale.train.state.run_lock import sole_run
    from freescale.train.state.run_state import load_run, run_tensors
    from freescale.train.state.same_data import agree_on_data, data_changes
    from freescale.train.state.saved import best_in, load_tensors, read_meta, saved_in, step_of
    from freescale.train.state.shared_folder import check_shared
    from freescale.train.stop_request import StopRequest, stop_on_sigterm
else:
    __getattr__, __dir__ = open_door(__name__)
