"""Whether code that is not ours keeps the one curve: rules, each tried on the user's own code and data."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.check.listeners import check_listeners
    from freescale.check.model_check import check_model
    from freescale.check.report import CheckReport, Violation, judge_report
    from freescale.check.source_rules import check_source_rules
else:
    __getattr__, __dir__ = open_door(__name__)
