"""Bridges: models that were written for other libraries, over our tables."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.bridge.collection import BridgedCollection, BridgedPipeline
    from freescale.bridge.dcp_files import save_tensors
    from freescale.bridge.jagged import JaggedFeature, KeyedFeatures
    from freescale.bridge.keyed_balance import BalancedKJT, KJTBalancer
    from freescale.bridge.row_folder import RowFolder, write_row_folder
    from freescale.bridge.saved_tables import RowsById, SavedTable, choose_tables, read_rows
    from freescale.bridge.start_rows import fill_table, rows_by_id
    from freescale.bridge.versions import require_torchrec
    from freescale.bridge.written_tables import as_saved, names_of_table
else:
    __getattr__, __dir__ = open_door(__name__)
