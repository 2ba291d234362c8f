"""What a trained model becomes for those who ask: an export, chains of versions, and models that answer from them.

`ExportedModel` recommends and scores; it needs nothing of the run that made it. `chain` keeps a base and its deltas.
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.exports.chain_model import ChainModel
    from freescale.exports.chains.chain import ASIDE, Publisher, is_chain, load_version
    from freescale.exports.chains.version import Version, read_version
    from freescale.exports.export import RestOfItems, write_export
    from freescale.exports.export_reader import exported_version
    from freescale.exports.exported_model import ExportedModel
    from freescale.exports.opened_export import load_export
    from freescale.exports.served.served_features import ExportFeatures, request_needs
else:
    __getattr__, __dir__ = open_door(__name__)
