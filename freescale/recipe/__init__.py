"""From a recipe to objects: one file a subject with its section, checks and build; `assembly` orders them.

reading/     from YAML, overrides and options to checked values
building/    what takes several sections: tables, captured steps, rows to start from, traffic
"""

from typing import TYPE_CHECKING

from freescale.doors import open_door

if TYPE_CHECKING:
    from freescale.recipe.assembly import build_run, same_recipe
    from freescale.recipe.balance import build_sampler, sample_work
    from freescale.recipe.building.run_tables import build_tables
    from freescale.recipe.building.start_rows import start_digests, start_names, start_tables
    from freescale.recipe.building.table_traffic import asked_ids, expected_ids
    from freescale.recipe.config import Config
    from freescale.recipe.data import build_examples, build_source
    from freescale.recipe.features import build_features, item_features, run_schema, token_features
    from freescale.recipe.items import item_content
    from freescale.recipe.model import build_model, encoder_shape
    from freescale.recipe.optim import build_optimizer
    from freescale.recipe.pipeline import room_to_postpone
    from freescale.recipe.reading.identity import run_identity
    from freescale.recipe.reading.keys import changed as changed_keys
    from freescale.recipe.reading.load import (
        describe_keys,
        describe_options,
        describe_recipe,
        free_keys,
        load_config,
        read_recipe,
    )
    from freescale.recipe.tables import table_options
    from freescale.recipe.tokens import export_features
    from freescale.recipe.trace import open_span_file
else:
    __getattr__, __dir__ = open_door(__name__)
