"""Bridges: models that were written for other libraries, over our tables."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.bridge.collection import BridgedCollection, BridgedPipeline
    from freescale.bridge.jagged import JaggedFeature, KeyedFeatures
    from freescale.bridge.versions import TORCHREC, require_torchrec
else:
    __getattr__, __dir__ = open_door(__name__)
