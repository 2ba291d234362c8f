"""The sections of a recipe: every key with its default, its range and one line of help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


def _key(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    free: bool = False,
) -> Any:
    """A recipe key: its default, one line of help, its range, and whether it may change within one run.

    Free keys move work or files, never the curve; a resumed run may come with others.
    """
    return field(
        default=default, metadata={"help": help, "at_least": at_least, "at_most": at_most, "free": free}
    )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run lives and how long it goes on."""

    out: str = _key("runs/latest", "folder for config, metrics, checkpoints and the report", free=True)
    steps: int | None = _key(
        None, "length of the run in steps; null: run.epochs decides", at_least=1, free=True
    )
    epochs: float = _key(8.0, "passes over the data when run.steps is null", at_least=0.001, free=True)
    seed: int = _key(
        1, "seed of batches, negatives, initial weights and dropout", at_least=0, at_most=2**63 - 1
    )
    log_every: int = _key(20, "steps between two log lines", at_least=1, free=True)
    eval_every: int | None = _key(
        None, "steps between evaluations; null: once an epoch", at_least=1, free=True
    )
    checkpoint_every: int | None = _key(
        None, "steps between checkpoints; null: at every evaluation", at_least=1, free=True
    )
    keep: int = _key(2, "number of latest checkpoints to keep, besides the best", at_least=1, free=True)
    patience: int | None = _key(
        None, "stop after this many evaluations without a better one", at_least=1, free=True
    )
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where to compute", free=True)
    tensorboard: bool = _key(False, "also write TensorBoard files to RUN_DIR/tensorboard", free=True)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The histories and how a global batch is drawn from them."""

    path: str = _key(
        "synthetic", "'synthetic', a prepared folder, or a raw file to prepare on the way", free=True
    )
    global_batch: int = _key(128, "samples a step, over all ranks", at_least=1)
    global_tokens: int | None = _key(
        None, "tokens a step over all ranks, instead of global_batch", at_least=1
    )
    max_length: int = _key(200, "keep this many latest events of a history", at_least=1)
    shuffle_rows: int = _key(
        100_000, "histories shuffled together; bounds the memory of the reader", at_least=1
    )
    cache_mb: int = _key(256, "memory a process keeps recently read row groups in", at_least=1, free=True)
    workers: int = _key(0, "loader processes a rank; 0 loads in the training process", at_least=0, free=True)
    use_time: bool = _key(True, "use time stamps where the data has them")


@dataclass(frozen=True, kw_only=True)
class SyntheticSection:
    """The embedded data set: long-tailed lengths, Zipf ids, a planted preference."""

    users: int = _key(3000, "number of histories", at_least=1)
    items: int = _key(1500, "number of items", at_least=10)
    mean_length: float = _key(30.0, "mean events a history", at_least=3)
    sigma: float = _key(1.0, "spread of the log-normal lengths", at_least=0, at_most=3)
    max_length: int = _key(400, "longest history", at_least=4)
    zipf: float = _key(1.0, "exponent of the item popularity", at_least=0)
    preference: float = _key(
        0.8, "share of events that follow the user's planted taste", at_least=0, at_most=1
    )


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The sequence encoder."""

    kind: Literal["hstu", "sasrec", "llama"] = _key("hstu", "encoder")
    dim: int = _key(64, "width of item vectors and layers", at_least=2)
    layers: int = _key(2, "number of layers", at_least=1)
    heads: int = _key(1, "attention heads; dim must be a multiple", at_least=1)
    dropout: float = _key(0.2, "dropout inside layers and on the input", at_least=0, at_most=0.95)
    dtype: Literal["float32", "bfloat16", "float64"] = _key(
        "float32",
        "float32; bfloat16 = autocast on a GPU, float32 on a CPU; float64 = everything, tables included",
    )
    position_bias: bool = _key(True, "HSTU: relative position bias")
    time_bias: bool = _key(True, "HSTU: relative time bias, where the data has time stamps")
    kv_heads: int | None = _key(
        None, "llama: heads of keys and values, a divisor of heads; null: as many", at_least=1
    )
    ffn_dim: int | None = _key(
        None, "llama: width inside the feed-forward part; null: 8/3 of dim", at_least=1
    )
    rope_base: float = _key(10_000.0, "llama: how slowly the slowest rotary pair turns", at_least=2)


@dataclass(frozen=True, kw_only=True)
class SegmentsSection:
    """Long histories compressed into summary tokens; off unless `recent` is set."""

    recent: int | None = _key(
        None, "latest events that stay as they are, older ones are compressed; null: nothing is", at_least=1
    )
    length: int = _key(350, "events of a segment; the last one of a history may be shorter", at_least=1)
    summaries: int = _key(4, "learnt summary tokens behind each segment", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ItemsSection:
    """Where item vectors come from."""

    kind: Literal["ids", "content", "text"] = _key(
        "ids", "rows of a table, projected content vectors, or a trained encoder of texts"
    )
    file: str | None = _key(
        None,
        "content: vectors (.npy), text: texts (.parquet); null: content.npy, texts.parquet in data.path",
        free=True,
    )
    add_ids: bool = _key(True, "content, text: add the item's row of the table to its vector")
    vocabulary: Literal["words", "bytes"] = _key("words", "text: what a text is cut into")
    min_count: int = _key(1, "text: words of fewer texts count as unknown", at_least=1)
    max_tokens: int = _key(64, "text: pieces kept of a text, its end included", at_least=2)
    dim: int = _key(64, "text: width of the text encoder", at_least=2)
    layers: int = _key(2, "text: layers of the text encoder", at_least=1)
    heads: int = _key(2, "text: its attention heads", at_least=1)
    dropout: float = _key(0.0, "text: dropout inside the text encoder", at_least=0, at_most=0.95)
    chunk: int = _key(
        8192, "items encoded at once; more are computed again in the backward", at_least=1, free=True
    )


@dataclass(frozen=True, kw_only=True)
class FfnSection:
    """The feed-forward part of a layer; HSTU has none of its own."""

    kind: Literal["none", "dense", "moe"] = _key("none", "none, one for all tokens, or experts (section moe)")
    hidden: int | None = _key(
        None, "width between its two products, of one expert for moe; null: 4 times model.dim", at_least=1
    )
    activation: Literal["swiglu", "silu", "relu2"] = _key(
        "swiglu", "SiLU(gate) * up, SiLU, or ReLU squared; swiglu has a third product"
    )


@dataclass(frozen=True, kw_only=True)
class MoeSection:
    """Experts, where ffn.kind=moe: many feed-forward parts, of which a token uses a few."""

    experts: int = _key(8, "experts a layer", at_least=1, at_most=65_536)
    top_k: int = _key(2, "experts a token goes to", at_least=1)
    shared: int = _key(0, "experts every token uses besides, as one dense part", at_least=0)
    score: Literal["softmax", "sigmoid"] = _key("softmax", "over the experts, or for each alone")
    renormalize: bool = _key(True, "divide the weights of a token's experts by their sum")
    scale: float = _key(1.0, "multiplies the weights", at_least=0)
    bias_rate: float = _key(
        0.05,
        "how fast selection biases move towards even load, in spreads of the logits a step; 0: off",
        at_least=0,
    )
    aux_loss: float = _key(0.0, "coefficient of the balance loss", at_least=0)
    z_loss: float = _key(0.0, "coefficient of the mean squared logsumexp of the router", at_least=0)
    forced: bool = _key(False, "deal tokens out in turn instead of choosing (for benchmarks; learns nothing)")
    save: Literal["preact", "input", "all"] = _key(
        "preact", "kept for the backward: input and pre-activation, input alone, or everything", free=True
    )
    backend: Literal["auto", "reference", "eager", "grouped", "triton"] = _key(
        "auto", "how experts are computed", free=True
    )
    parallel: bool = _key(False, "spread the experts over the ranks; tokens travel to them", free=True)


@dataclass(frozen=True, kw_only=True)
class HeadSection:
    """What the model is trained to predict."""

    kind: Literal["retrieval", "ranking"] = _key(
        "retrieval", "next item by sampled softmax, or actions as labels"
    )
    num_negatives: int = _key(128, "negatives drawn for each sample", at_least=1)
    temperature: float = _key(0.05, "divides the logits of the sampled softmax", at_least=1e-4)
    normalize: bool = _key(True, "l2-normalise user and item vectors")
    label_thresholds: tuple[float, ...] = _key(
        (3.5,), "ranking: one binary task a threshold, label = action > threshold"
    )


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection:
    """The item table and its own optimizer."""

    id_map: Literal["direct", "hash", "zero_collision"] = _key(
        "direct", "how raw ids become rows: a row for each number, by hash, or learnt in training"
    )
    rows: int | None = _key(
        None,
        "table rows; null: largest id + 1, zero_collision: 1.5 times the items (required for id_map=hash)",
        at_least=1,
    )
    max_probe: int = _key(128, "zero_collision: rows an id may live in", at_least=1)
    buckets: int | None = _key(
        None, "zero_collision: parts that ranks hold as a whole; null: by the number of rows", at_least=1
    )
    eviction: Literal["none", "ttl", "lru", "lfu"] = _key(
        "none", "zero_collision: which id gives way when all rows it may live in are taken"
    )
    ttl: int | None = _key(None, "eviction=ttl: steps an id stays after it was last seen", at_least=1)
    admit_after: int = _key(1, "zero_collision: steps an id must be seen in to get a row", at_least=1)
    admission: Literal["count_min", "exact"] = _key(
        "count_min", "admit_after: how ids without a row are counted"
    )
    guard: int = _key(
        3,
        "zero_collision: rows of this many last steps are not taken over; bounds batches under way",
        at_least=0,
    )
    optimizer: Literal["sgd", "rowwise_adagrad", "adam"] = _key("adam", "sparse optimizer of the table")
    lr: float = _key(1e-3, "learning rate of the table, follows optim.schedule", at_least=0)
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "storage type of the table (float64 with model.dtype)"
    )
    beta2: float = _key(0.98, "adam: decay of the second moment", at_least=0, at_most=0.999999)
    eps: float = _key(1e-8, "adam, adagrad: added to the denominator", at_least=1e-30)
    replicate_below_mb: float = _key(
        0.0, "replicate tables smaller than this on every rank", at_least=0, free=True
    )


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """AdamW for the dense parameters."""

    lr: float = _key(1e-3, "learning rate", at_least=0)
    weight_decay: float = _key(0.0, "AdamW weight decay", at_least=0)
    beta1: float = _key(0.9, "decay of the first moment", at_least=0, at_most=0.999999)
    beta2: float = _key(0.98, "decay of the second moment", at_least=0, at_most=0.999999)
    schedule: Literal["constant", "cosine"] = _key("constant", "shape of the learning rate after warm-up")
    warmup_steps: int = _key(0, "steps of linear warm-up", at_least=0)
    clip_norm: float | None = _key(None, "clip the global norm of the dense gradients", at_least=0)
    accumulate: int = _key(
        1, "micro-batches a step (less activation memory, same curve)", at_least=1, free=True
    )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Leave-one-out evaluation by full ranking."""

    metric: Literal["hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "ndcg@200", "mrr", "auc"] = _key(
        "ndcg@10", "what decides the best checkpoint and early stopping"
    )
    batch: int = _key(256, "histories evaluated at once on a rank", at_least=1, free=True)
    max_users: int | None = _key(
        None, "evaluate during training on the first N users only", at_least=1, free=True
    )
    item_chunk: int = _key(
        65_536, "items scored at once; bounds memory for large catalogues", at_least=1, free=True
    )


@dataclass(frozen=True, kw_only=True)
class BalanceSection:
    """Which rank computes which sample."""

    enabled: bool = _key(True, "balance predicted cost over the ranks", free=True)
    max_tokens_ratio: float = _key(1.10, "cap on a rank's tokens, times the mean", at_least=1, free=True)
    window: int = _key(1, "steps planned together", at_least=1)
    cost_model: str | None = _key(
        None, "JSON file of a measured cost model, e.g. RUN_DIR/cost_model.json of an earlier run", free=True
    )
    refit_every: int | None = _key(
        50,
        "steps between agreements on measured costs and rank speeds; null: keep the defaults",
        at_least=1,
        free=True,
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How the stages of a batch overlap."""

    prioritized: bool = _key(
        True, "hide embedding traffic under compute on more than one rank; false: the plain path", free=True
    )
    ahead: bool | None = _key(
        None,
        "on one rank a thread loads batches and finds their rows while others compute; null: on a GPU",
        free=True,
    )
    decide_every: int | None = _key(
        100,
        "steps before the first trial of the other way; trials follow at 2, 4, 8, ... times it; null: no trials",
        at_least=1,
        free=True,
    )
    chunk_mb: float = _key(
        1.0,
        "hidden traffic travels in pieces of this size, so that urgent traffic passes",
        at_least=0.001,
        free=True,
    )
    check: bool = _key(
        False,
        "prove in every step that no row is read before its last update (slow, for debugging)",
        free=True,
    )


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """How ranks talk."""

    transport: Literal[
        "auto", "collective", "copy_engine", "experimental_nccl_zero_sm", "host_staged", "local"
    ] = _key(
        "auto", "route of the embedding exchange; auto picks by device and machine and says why", free=True
    )
    timeout_s: float = _key(600.0, "a collective that takes longer ends the run", at_least=1, free=True)


@dataclass(frozen=True, kw_only=True)
class TraceSection:
    """What is recorded of where the time goes."""

    enabled: bool = _key(
        True, "account for the time of every step, and keep spans for the timeline of the report", free=True
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe. Every key has a default: `Config()` trains HSTU on the embedded data."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    synthetic: SyntheticSection = field(default_factory=SyntheticSection)
    model: ModelSection = field(default_factory=ModelSection)
    ffn: FfnSection = field(default_factory=FfnSection)
    moe: MoeSection = field(default_factory=MoeSection)
    segments: SegmentsSection = field(default_factory=SegmentsSection)
    items: ItemsSection = field(default_factory=ItemsSection)
    head: HeadSection = field(default_factory=HeadSection)
    embedding: EmbeddingSection = field(default_factory=EmbeddingSection)
    optim: OptimSection = field(default_factory=OptimSection)
    eval: EvalSection = field(default_factory=EvalSection)
    balance: BalanceSection = field(default_factory=BalanceSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    comm: CommSection = field(default_factory=CommSection)
    trace: TraceSection = field(default_factory=TraceSection)

    def to_yaml(self) -> str:
        """The recipe as YAML that `load_config` reads back to an equal object."""
        plain = {
            section: {key: as_yaml(entry) for key, entry in dataclasses.asdict(value).items()}
            for section, value in self._sections()
        }
        return yaml.safe_dump(plain, sort_keys=False)

    def _sections(self) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(self):
            yield item.name, getattr(self, item.name)


def as_yaml(value: Any) -> Any:
    """As YAML knows it."""
    return list(value) if isinstance(value, tuple) else value
