"""Tables of ids: find, claim, evict, touch."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.id_table.api import claim, claim_rows, evict, find, occupied_bits, share, touch
    from freescale.kernels.id_table.layout import EMPTY, SlotLayout, make_layout
else:
    __getattr__, __dir__ = open_door(__name__)
