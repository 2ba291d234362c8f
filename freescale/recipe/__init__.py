"""From a recipe to objects: sections, checks, and what builds a run."""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.recipe.assembly import (
        build_examples,
        build_run,
        build_source,
        build_tables,
        open_span_file,
    )
    from freescale.recipe.load import Config, describe_keys, free_keys, load_config
    from freescale.recipe.model_assembly import build_model, build_optimizer, encoder_shape, segment_rule
else:
    __getattr__, __dir__ = open_door(__name__)
