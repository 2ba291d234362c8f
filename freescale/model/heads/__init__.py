"""Heads: a file is a kind that `head.kind` can name, registered where it is defined."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.model.heads.ranking import RankingHead
    from freescale.model.heads.retrieval import RetrievalHead
    from freescale.model.heads.tasks import TasksHead, TasksOptions, target_index
else:
    __getattr__, __dir__ = open_door(__name__)
