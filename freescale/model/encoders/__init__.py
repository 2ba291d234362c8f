"""Encoders: a file is a kind that `model.kind` can name, registered where it is defined."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.model.encoders.hstu import HSTU, HSTULayer
    from freescale.model.encoders.llama import Decoder
    from freescale.model.encoders.sasrec import SASRec
    from freescale.model.encoders.stu import STU, STULayer
else:
    __getattr__, __dir__ = open_door(__name__)
