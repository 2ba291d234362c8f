"""Commands with items known by their texts or content: train, evaluate, export; and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freescale.app.run.opened_run import evaluate_run, export_run
from freescale.app.run.train_run import train_run
from freescale.errors import ConfigError, DataError
from freescale.exports.opened_export import load_export
from freescale.recipe import build_source, load_config
from tests.item_files import write_made_up_content, write_made_up_texts
from tests.small_run import SMALL, Recorder, make_run

TEXT = ("items.kind=text", "items.dim=8", "items.layers=1")


def train(folder: Path, *overrides: str, resume: str = "never"):
    config = load_config(None, [*SMALL, "run.steps=6", "run.eval_every=6", *overrides, f"run.out={folder}"])
    return train_run(config, resume=resume, open_terminal=lambda total: Recorder())


@pytest.mark.parametrize("kind", ["text", "text and ids", "text and learnt ids", "content"])
def test_a_run_is_evaluated_and_exported_as_it_was_trained(tmp_path: Path, kind: str) -> None:
    num_items = len(build_source(load_config(None, SMALL)).items.ids)
    if kind == "content":
        file = write_made_up_content(tmp_path / "content.npy", num_items)
        options = ("items.kind=content", f"items.file={file}", "model.kind=llama")
    else:
        options = (*TEXT, f"items.file={write_made_up_texts(tmp_path / 'texts.parquet', 150)}")
        options += {
            "text": ("items.add_ids=false",),
            "text and learnt ids": ("embedding.id_map=zero_collision",),
        }.get(kind, ())
    summary = train(tmp_path / "run", *options)
    assert evaluate_run(tmp_path / "run", device="cpu")["metrics"] == pytest.approx(summary["test"])
    served = load_export(export_run(tmp_path / "run", tmp_path / "out"))
    assert len(served.items) == num_items
    assert served.manifest["items"] == kind.split()[0]
    history = served.items[:5].tolist()
    times = {"times": list(range(5))} if served.manifest["encoder"]["time_bias"] else {}
    assert len(served.recommend(history, k=3, **times)) == 3


def test_data_without_texts_or_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set items\.file"):
        make_run(TEXT, tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        make_run((*TEXT, f"items.file={tmp_path / 'nowhere.parquet'}"), tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        make_run(("items.kind=content", f"items.file={tmp_path / 'nowhere.npy'}"), tmp_path)


def test_texts_and_content_of_other_items_are_refused(tmp_path: Path) -> None:
    few = write_made_up_texts(tmp_path / "few.parquet", 20)
    with pytest.raises(DataError, match="some items have no text"):
        make_run((*TEXT, f"items.file={few}"), tmp_path)
    short = write_made_up_content(tmp_path / "short.npy", 7)
    with pytest.raises(DataError, match="7 rows"):
        make_run(("items.kind=content", f"items.file={short}"), tmp_path)


def test_content_of_another_width_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    num_items = len(build_source(load_config(None, SMALL)).items.ids)
    file = write_made_up_content(tmp_path / "content.npy", num_items, width=5)
    options = ("items.kind=content", f"items.file={file}")
    train(tmp_path / "run", *options)
    np.save(file, np.ones((num_items, 7), np.float32))
    with pytest.raises(DataError, match="content vectors or texts of the items"):
        train(tmp_path / "run", *options, "run.steps=8", resume="auto")
