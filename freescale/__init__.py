"""FreeScale: trains sequence recommenders on one device or many, with balanced ranks and the same losses.

Public names are loaded when they are first used: `import freescale` alone imports neither torch nor numba.
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door
from freescale.version import __version__

if TYPE_CHECKING:
    from freescale.app.program.tables import Table
    from freescale.app.program.trainer import Trainer
    from freescale.balance import BalancedSampler
    from freescale.data import SequenceBatch
    from freescale.embedding import ShardedEmbedding, TableSpec, ZeroCollisionMap
    from freescale.exports import load_export
    from freescale.model import Dropout, TokenCache, dropout_keys
    from freescale.pipeline import PrioritizedPipeline
    from freescale.registry import register
else:
    __getattr__, __dir__ = open_door(__name__)
