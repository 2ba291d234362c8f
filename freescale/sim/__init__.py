"""What would N GPUs give me? One measured device, a file of lengths and a cluster description in, a step time out.

Numbers from here are predictions. Plans come from `balance`, bubbles are those of `trace.bubbles`; no torch.
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.sim.answers.terminal import answer_lines, profile_table
    from freescale.sim.answers.whatif import simulate_features
    from freescale.sim.command import described_keys, simulate_from_options
    from freescale.sim.costs.plans import loads_of
    from freescale.sim.costs.setting import Features, Setting
    from freescale.sim.inputs.cluster import load_cluster, preset_names
    from freescale.sim.inputs.profile import BY_LAYER, WEIGHTS, Profile, Timing, cost_model_of
    from freescale.sim.inputs.table_loads import TableLoad, write_tables
    from freescale.sim.inputs.workload import Workload
else:
    __getattr__, __dir__ = open_door(__name__)
