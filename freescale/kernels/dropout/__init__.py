"""Dropout by keyed masks: which numbers fall is a function of (seed, step, sample, position, site, column)."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.kernels.dropout.api import (
        Masked,
        dropout,
        key_of_step,
        masked,
        padded_keys,
        sample_keys,
        token_keys,
    )
    from freescale.kernels.dropout.triton.masks import kept
else:
    __getattr__, __dir__ = open_door(__name__)
