"""Proofs on your own machines: claims of this library tried on the ranks that are there, and a report of what held."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.prove.claim import Claim, Facts, Finding, Report, Setting, Table
    from freescale.prove.command import DATA, PAGE, Wanted, chosen, prove
    from freescale.prove.proof import Proof
else:
    __getattr__, __dir__ = open_door(__name__)
