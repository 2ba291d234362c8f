"""Write the pages of docs/api: which names the reference shows, each under the path it is imported from.

python docs/make_api.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "api"
WRITTEN = "<!-- Written by docs/make_api.py: change it there. -->"


class Page(NamedTuple):
    """A page: its title, a sentence, and the names it shows; a name of a module alone shows all of it."""

    title: str
    text: str
    names: tuple[str, ...]


PAGES = {
    "trainer": Page(
        "Trainer",
        "A run from a program, with your own encoder, head or source: [your own models](../own_models.md).",
        (
            "freescale.Trainer",
            "freescale.Table",
            "freescale.check.CheckReport",
            "freescale.check.Violation",
            "freescale.train.Judge",
            "freescale.train.MetricSink",
            "freescale.train.WandbSink",
            "freescale.train.MlflowSink",
            "freescale.data.ListedHistories",
        ),
    ),
    "balance": Page(
        "Balance",
        "Samples shared out over ranks so that all finish together: [how it works](../balance.md).",
        (
            "freescale.BalancedSampler",
            "freescale.balance.StepPlan",
            "freescale.balance.partition",
            "freescale.balance.partition_report",
            "freescale.balance.Partition",
            "freescale.balance.CostModel",
            "freescale.balance.MeasuredStep",
            "freescale.balance.fit_cost_model",
            "freescale.balance.Balancer",
            "freescale.pipeline.loading.stream_balance.StreamBalancer",
        ),
    ),
    "embedding": Page(
        "Embedding",
        "Tables over ranks and rows for ids: [tables](../embedding.md), [zero-collision ids](../ids.md).",
        (
            "freescale.TableSpec",
            "freescale.ShardedEmbedding",
            "freescale.embedding.SparseOptimizer",
            "freescale.embedding.Adam",
            "freescale.embedding.RowwiseAdagrad",
            "freescale.embedding.SGD",
            "freescale.ZeroCollisionMap",
            "freescale.embedding.Assignment",
            "freescale.embedding.ids.eviction",
            "freescale.embedding.IdMap",
        ),
    ),
    "pipeline": Page(
        "Pipeline",
        "Rows and gradients that travel while the model computes: [how it works](../prioritized.md).",
        ("freescale.PrioritizedPipeline",),
    ),
    "data": Page(
        "Data",
        "From raw interactions to jagged batches: [data sets](../data.md).",
        (
            "freescale.data.prepare",
            "freescale.data.ColumnNames",
            "freescale.data.SequenceSource",
            "freescale.data.source.Histories",
            "freescale.data.ParquetSource",
            "freescale.SequenceBatch",
            "freescale.data.Schema",
            "freescale.data.Feature",
            "freescale.data.FeatureSource",
            "freescale.data.BatchFeatures",
            "freescale.data.RawFormat",
            "freescale.data.RawSample",
            "freescale.data.Reading",
        ),
    ),
    "serving": Page(
        "Serving",
        "An export answers without the training around it: [exports](../checkpoints.md).",
        (
            "freescale.load_export",
            "freescale.exports.exported_model.ExportedModel",
            "freescale.TokenCache",
            "freescale.model.Compressor",
        ),
    ),
    "model": Page(
        "Models",
        "The parts of a model: [kinds of your own](../extend.md).",
        (
            "freescale.model.Encoder",
            "freescale.model.EncoderShape",
            "freescale.Dropout",
            "freescale.dropout_keys",
            "freescale.model.HSTU",
            "freescale.model.SASRec",
            "freescale.model.Decoder",
            "freescale.model.Head",
            "freescale.model.RetrievingHead",
            "freescale.model.Recommender",
            "freescale.model.MoE",
        ),
    ),
    "kernels": Page(
        "Kernels",
        "Jagged attention and experts on CPU and GPU, each with a plain reference: [attention](../attention.md), "
        "[experts](../moe_kernels.md).",
        (
            "freescale.kernels.hstu_attention",
            "freescale.kernels.softmax_attention",
            "freescale.kernels.AttentionMask",
            "freescale.kernels.SequenceLayout",
            "freescale.kernels.expert_mlp",
        ),
    ),
    "registry": Page(
        "Registry",
        "Kinds by name, from the package and from outside: [one of each](../extend.md).",
        ("freescale.register", "freescale.registry.load_plugin", "freescale.registry.names"),
    ),
    "errors": Page(
        "Errors",
        "What commands and calls raise, and the exit codes of commands: [clusters](../clusters.md).",
        ("freescale.errors",),
    ),
}


def found(name: str) -> Any:
    """The object of a dotted name."""
    room, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(room), last)
    except AttributeError:
        return importlib.import_module(name)


def text_of(page: Page) -> str:
    """A page in Markdown."""
    parts = [f"# {page.title}", WRITTEN, page.text]
    for name in page.names:
        shown = found(name)
        where = name if not hasattr(shown, "__qualname__") else f"{shown.__module__}.{shown.__qualname__}"
        parts.append(
            f"::: {where}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}"
        )
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The first page."""
    rows = [f"| [{page.title}]({name}.md) | {_short(page)} |" for name, page in PAGES.items()]
    text = (
        "Names you import, with their signatures and types. Other pages teach; these say what arguments mean."
    )
    return (
        "\n".join(["# API reference", "", WRITTEN, "", text, "", "| page | names |", "|---|---|", *rows])
        + "\n"
    )


def _short(page: Page) -> str:
    return ", ".join(f"`{name.rpartition('.')[2]}`" for name in page.names)


def pages() -> dict[str, str]:
    """File name -> content."""
    return {"index.md": index(), **{f"{name}.md": text_of(page) for name, page in PAGES.items()}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
