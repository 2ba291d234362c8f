"""DLRMv4 here against the code of its reference: same weights, same inputs; predictions, loss and all gradients.

    PYTHONPATH=. python benchmarks/dlrmv4_reference.py --peer DIR

DIR is the folder `recommendation_v4` of a checkout of mlcommons/training that has it (commit a67b8459). Its modules are
run as they are, on their plain PyTorch path. Where torchrec and fbgemm_gpu are not installed, three operations of
theirs on jagged tensors are stood in for, and the classes that the modules import and do not use here.

Lengths are those of the made-up log (`data.source=dlrmv4_twin`): real ones, 2,663 events in the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data import FIRST, SLOT, SequenceBatch, checked_schema, parse_tasks
from freescale.model import STU, ContextTokens, ItemTowers, Recommender, TasksHead

CROSSES = (
    "user_x_artist",
    "user_x_album",
    "user_x_hour",
    "item_x_hour",
    "artist_x_hour",
    "user_x_organic",
    "user_x_artist_x_hour",
)
CONTEXT = ("user", *CROSSES)
HIDDEN, JUDGED = 256, 512
"""Fixed in the reference, whatever the width."""


def stand_ins() -> list[str]:
    """Make the reference's modules importable without torchrec and fbgemm_gpu; what was stood in for."""
    made = []
    try:
        import torchrec  # noqa: F401
    except ImportError:
        made.append("torchrec: classes that are imported and not used here")
        names = {
            "torchrec": ["KeyedJaggedTensor"],
            "torchrec.modules": [],
            "torchrec.modules.embedding_configs": ["EmbeddingConfig"],
            "torchrec.modules.embedding_modules": ["EmbeddingCollection"],
        }
        for name, classes in names.items():
            module = types.ModuleType(name)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            sys.modules[name] = module
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        made.append("fbgemm: asynchronous_complete_cumsum, jagged_to_padded_dense, dense_to_jagged")
        torch.ops.fbgemm = types.SimpleNamespace(  # type: ignore[assignment]
            asynchronous_complete_cumsum=_offsets_of,
            jagged_to_padded_dense=_padded,
            dense_to_jagged=_jagged,
        )
    return made


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _places(offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(sequence, place) of every token that fits."""
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
    place = torch.arange(len(owner), device=offsets.device) - offsets[:-1][owner]
    return owner, place


def _padded(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    owner, place = _places(offsets[0], max_lengths[0])
    out = values.new_full((len(offsets[0]) - 1, max_lengths[0], *values.shape[1:]), padding_value)
    fits = place < max_lengths[0]
    return out.index_put((owner[fits], place[fits]), values[: len(owner)][fits])


def _jagged(
    dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    owner, place = _places(x_offsets[0], dense.shape[1])
    return dense[owner, place], x_offsets


@dataclass(frozen=True)
class Inputs:
    """One batch: rows of every table, and where tokens point to."""

    rows: dict[str, Tensor]
    lengths: Tensor
    item: Tensor
    artist_of: Tensor
    album_of: Tensor
    target: Tensor
    action: Tensor
    time: Tensor
    context: dict[str, Tensor]
    label: Tensor


def inputs_of(lengths: list[int], *, dim: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Random rows and ids; times rise by sessions, up to 300 days."""
    draws = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draws)

    num_items, num_artists, num_albums, batch = 300, 40, 90, len(lengths)
    sizes = {"item": num_items, "artist": num_artists, "album": num_albums} | dict.fromkeys(CONTEXT, 50)
    rows = {
        name: torch.randn(size, dim, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }
    total = sum(lengths)
    steps = torch.where(whole(20, total) == 0, whole(40_000, total), whole(60, total)) * 5
    times = [part.cumsum(0) + 1_641_600_000 for part in steps.split(lengths)]
    return Inputs(
        rows=rows,
        lengths=torch.tensor(lengths),
        item=whole(num_items, total),
        artist_of=whole(num_artists, num_items),
        album_of=whole(num_albums, num_items),
        target=whole(num_items, batch),
        action=1 << whole(3, total),
        time=torch.cat(times),
        context={name: whole(50, batch) for name in CONTEXT},
        label=whole(2, batch),
    )


class Theirs:
    """The reference's model without its tables."""

    def __init__(
        self, *, dim: int, heads: int, layers: int, dropout: float = 0.0, bf16: bool = False
    ) -> None:
        from generative_recommenders.common import HammerKernel
        from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig, SequenceEmbedding
        from generative_recommenders.modules.multitask_module import MultitaskTaskType, TaskConfig

        self._embedding = SequenceEmbedding
        self.model = DlrmHSTU(
            DlrmHSTUConfig(
                max_seq_len=8192,
                max_num_candidates=1,
                hstu_num_heads=heads,
                hstu_attn_linear_dim=dim // heads,
                hstu_attn_qk_dim=dim // heads,
                hstu_attn_num_layers=layers,
                hstu_embedding_table_dim=dim,
                hstu_preprocessor_hidden_dim=HIDDEN,
                hstu_transducer_embedding_dim=dim,
                hstu_input_dropout_ratio=2 * dropout,
                hstu_linear_dropout_rate=dropout,
                contextual_feature_to_max_length=dict.fromkeys(CONTEXT, 1),
                contextual_feature_to_min_uih_length=dict.fromkeys(CONTEXT, 0),
                candidates_weight_feature_name="item_action_weight",
                candidates_watchtime_feature_name="item_dummy_watchtime",
                candidates_querytime_feature_name="item_query_time",
                multitask_configs=[TaskConfig("listen_plus", 1, MultitaskTaskType.BINARY_CLASSIFICATION)],
                user_embedding_feature_names=[*CONTEXT, "item_id", "artist_id", "album_id"],
                item_embedding_feature_names=["candidate_id", "candidate_artist_id", "candidate_album_id"],
                uih_post_id_feature_name="item_id",
                uih_action_time_feature_name="action_timestamp",
                uih_weight_feature_name="action_weight",
                merge_uih_candidate_feature_mapping=[
                    ("item_id", "candidate_id"),
                    ("artist_id", "candidate_artist_id"),
                    ("album_id", "candidate_album_id"),
                    ("action_weight", "item_action_weight"),
                    ("action_timestamp", "item_query_time"),
                    ("dummy_watch_time", "item_dummy_watchtime"),
                ],
                action_weights=[1, 2, 4],
            ),
            embedding_tables={},
            is_inference=False,
            is_dense=True,
            bf16_training=bf16,
        )
        self.model.set_hammer_kernel(HammerKernel.PYTORCH)
        self.model.train()

    def __call__(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """Predictions and loss."""
        index = {
            "item": given.item,
            "artist": given.artist_of[given.item],
            "album": given.album_of[given.item],
        }
        asked = {
            "item": given.target,
            "artist": given.artist_of[given.target],
            "album": given.album_of[given.target],
        } | given.context
        return self.of_rows(
            given,
            {name: given.rows[name][places] for name, places in index.items()},
            {name: given.rows[name][places] for name, places in asked.items()},
        )

    def of_rows(
        self, given: Inputs, events: dict[str, Tensor], asked: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same where the row of every event, and of every candidate and context, is given."""
        batch, ones = len(given.lengths), torch.ones_like(given.lengths)
        found = {f"{name}_id": self._embedding(given.lengths, rows) for name, rows in events.items()}
        names = {"item": "candidate_id", "artist": "candidate_artist_id", "album": "candidate_album_id"}
        found |= {names.get(name, name): self._embedding(ones, rows) for name, rows in asked.items()}
        payload = {
            "action_weight": given.action,
            "item_action_weight": given.label,
            "action_timestamp": given.time,
            "item_query_time": given.time[given.lengths.cumsum(0) - 1],
            "dummy_watch_time": torch.zeros_like(given.action),
            "item_dummy_watchtime": given.label.new_ones(batch),
            "uih_offsets": _offsets_of(given.lengths),
            "candidate_offsets": _offsets_of(ones),
        }
        out = self.model.main_forward(found, payload, int(given.lengths.max()), given.lengths, 1, ones)
        return out[3][0], out[2]["listen_plus"]


def our_model(
    *,
    dim: int,
    heads: int,
    layers: int,
    short: bool,
    length: int = 1,
    time_buckets: int = 2048,
    dropout: float = 0.0,
) -> Recommender:
    """The model of the recipes, without its tables."""
    words: dict[str, Any] = {
        "item": {"of": "event", "is": "id"},
        "time": {"of": "event", "is": "time"},
        "artist": {"of": "item", "is": "id"},
        "album": {"of": "item", "is": "id"},
        "action": {"of": "event", "is": "bits", "names": ["listened", "liked", "skipped"], "outcome": True},
        "user": {"of": "user", "is": "id"},
        "hour": {"of": "event", "is": "id", "values": [str(hour) for hour in range(24)]},
        "organic": {"of": "event", "is": "id", "values": ["no", "yes"]},
    }
    words |= {name: {"cross": name.split("_x_"), "rows": 50, "as": "front"} for name in CROSSES}
    schema = checked_schema(words, where="the comparison")
    widths = dict.fromkeys(schema.tables, dim)
    return Recommender(
        encoder=STU(
            dim=dim,
            heads=heads,
            layers=layers,
            length=length,
            front=8,
            time_buckets=time_buckets,
            short=short,
            dropout=dropout,
            input_dropout=2 * dropout,
        ),
        head=TasksHead(
            dim=dim,
            tasks=parse_tasks(["listened = listened > 0 weight 0.2"]),
            towers="product",
            hidden=JUDGED,
        ),
        items=ItemTowers(
            [schema[name] for name in ("item", "artist", "album")],
            widths=widths,
            dim=dim,
            hidden=HIDDEN,
            judged=JUDGED,
        ),
        tokens=ContextTokens(
            [schema[name] for name in ("action", *CONTEXT)], widths=widths, dim=dim, hidden=HIDDEN
        ),
    )


class Ours:
    """The same of the parts that recipes name."""

    def __init__(self, *, dim: int, heads: int, layers: int, short: bool) -> None:
        # Their plain path takes the width for the number of time buckets; their kernels do not.
        self.model = our_model(dim=dim, heads=heads, layers=layers, short=short, time_buckets=dim - 1)

    def __call__(self, given: Inputs) -> tuple[Tensor, Tensor]:
        """Predictions and loss."""
        ends = given.lengths.cumsum(0)
        index = torch.cat(
            [
                torch.cat([part, target[None]])
                for part, target in zip(given.item.split(given.lengths.tolist()), given.target)
            ]
        )
        candidate = ends + torch.arange(len(ends))
        total = len(index)
        is_event = torch.ones(total, dtype=torch.bool).index_fill(0, candidate, False)

        def spread(events: Tensor, candidates: Tensor) -> Tensor:
            out = torch.empty(total, dtype=events.dtype)
            out[is_event], out[candidate] = events, candidates
            return out

        asked = given.time[ends - 1]
        time = spread(given.time, asked)
        batch = SequenceBatch(
            offsets=_offsets_of(given.lengths + 1),
            tokens={
                "item_index": index,
                "time": time,
                "target_time": torch.repeat_interleave(asked, given.lengths + 1),
                "action": spread(given.action, torch.zeros_like(given.target)),
                "label_listened": spread(torch.zeros(len(given.item)), given.label.float()),
            },
            samples={
                "row": torch.arange(len(ends)),
                **{name + SLOT: given.context[name] + FIRST for name in CONTEXT},
            },
            items={
                "item" + SLOT: torch.arange(len(given.artist_of)) + FIRST,
                "artist" + SLOT: given.artist_of + FIRST,
                "album" + SLOT: given.album_of + FIRST,
            },
            targets=torch.ones(len(ends), dtype=torch.int64),
        )
        longest = int(given.lengths.max()) + 1 + len(CONTEXT)
        for layer in self.model.encoder.layers:  # theirs is scaled by the longest sequence of the batch
            layer.scale = 1 / longest
        assert self.model.items is not None
        vectors = self.model.items(batch.items, given.rows)
        tables = {name: given.rows[name] for name in CONTEXT}
        from freescale.kernels import SequenceLayout

        layout = SequenceLayout(batch.offsets, device=torch.device("cpu"))
        states, vectors = self.model.encode(vectors, batch, layout, tables)
        head = self.model.head
        logits = head.logits(states, vectors[index[candidate]])
        return torch.sigmoid(logits[:, 0]), head.loss(states, vectors, batch, layout)


def pairs(theirs: Theirs, ours: Ours, dim: int) -> list[tuple[str, Tensor, Tensor, Any]]:
    """(name, theirs, ours, what makes ours of theirs) of every weight."""
    same = lambda x: x  # noqa: E731
    turned = lambda x: x.t()  # noqa: E731
    found: list[tuple[str, Tensor, Tensor, Any]] = []

    def mlp(name: str, left: nn.Module, right: nn.Module) -> None:
        for number, (a, b) in enumerate(zip(left, right)):
            own = getattr(b, "norm", b)
            found.append((f"{name}.{number}.weight", a.weight, own.weight, same))
            found.append((f"{name}.{number}.bias", a.bias, own.bias, same))

    peer, mine = theirs.model, ours.model
    transducer, encoder = peer._hstu_transducer, mine.encoder
    before, tokens, items = transducer._input_preprocessor, mine.tokens, mine.items
    for n, part in enumerate(tokens.front):
        one = lambda x, n=n: x[n]  # noqa: E731
        found.append(
            (
                f"context.{n}.weight",
                before._batched_contextual_linear_weights,
                part.weight,
                lambda x, n=n: x[n].t(),
            )
        )
        found.append((f"context.{n}.bias", before._batched_contextual_linear_bias, part.bias, one))
    mlp("item", before._content_embedding_mlp, items.own)
    mlp("artist and album", before._additional_embedding_mlp, items.others)
    mlp("action", before._action_embedding_mlp, tokens.of_bits)
    found.append(("bits", before._action_encoder._action_embedding_table, tokens.bits, same))
    found.append(("blank", before._action_encoder._target_action_embedding_table, tokens.blank, same))
    places = transducer._positional_encoder
    found.append(("position", places._position_embeddings_weight, encoder.input.position, same))
    found.append(("time", places._timestamp_embeddings_weight, encoder.input.time, lambda x: x[:dim]))
    for n, (left, right) in enumerate(zip(transducer._stu_module._stu_layers, encoder.layers)):
        found += [
            (f"layer {n} norm", left._input_norm_weight, right.norm, same),
            (f"layer {n} norm bias", left._input_norm_bias, right.norm_bias, same),
            (f"layer {n} uvqk", left._uvqk_weight, right.uvqk, same),
            (f"layer {n} uvqk bias", left._uvqk_beta, right.uvqk_bias, same),
            (f"layer {n} gate", left._output_norm_weight, right.gate, same),
            (f"layer {n} gate bias", left._output_norm_bias, right.gate_bias, same),
            (f"layer {n} output", left._output_weight, right.output, turned),
        ]
    after = transducer._output_postprocessor
    mlp("output", [after._time_feature_combiner, after._layer_norm], [encoder.output, encoder.norm])
    mlp("item tower", peer._item_embedding_mlp, items.judged)
    mlp("head", peer._multitask_module._prediction_module, mine.head.towers[0])
    return found


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def compare(
    lengths: list[int], *, dim: int, heads: int, layers: int, dtype: torch.dtype, short: bool, seed: int
) -> dict[str, Any]:
    """All differences of one batch."""
    torch.manual_seed(seed)
    theirs = Theirs(dim=dim, heads=heads, layers=layers)
    ours = Ours(dim=dim, heads=heads, layers=layers, short=short)
    # Norms and biases start as ones and zeros, which would hide what they are multiplied with.
    with torch.no_grad():
        for param in theirs.model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    theirs.model.to(dtype)
    theirs.model.set_training_dtype(dtype)
    ours.model.to(dtype).train()
    listed = pairs(theirs, ours, dim)
    covered = {id(mine) for _, _, mine, _ in listed}
    forgotten = [
        name
        for name, param in ours.model.named_parameters()
        if id(param) not in covered and "none.of_" not in name
    ]
    assert not forgotten, f"weights without a counterpart: {forgotten}"
    with torch.no_grad():
        for _, peer, mine, made in listed:
            mine.copy_(made(peer))
    given = inputs_of(lengths, dim=dim, dtype=dtype, seed=seed)
    predicted, loss = theirs(given)
    loss.backward()
    of_rows = {name: rows.grad.clone() for name, rows in given.rows.items()}
    for rows in given.rows.values():
        rows.grad = None
    own_predicted, own_loss = ours(given)
    own_loss.backward()
    dense = {name: relative(mine.grad, made(peer.grad)) for name, peer, mine, made in listed}
    tables = {name: relative(rows.grad, of_rows[name]) for name, rows in given.rows.items()}
    return {
        "dim": dim,
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "short last layer": short,
        "samples": len(lengths),
        "mean length": float(np.mean(lengths)),
        "weights": sum(param.numel() for param in ours.model.parameters()),
        "their weights": sum(param.numel() for param in theirs.model.parameters()),
        "predictions": relative(own_predicted, predicted),
        "loss": relative(own_loss, loss),
        "dense gradients": max(dense.values()),
        "worst weight": max(dense, key=dense.__getitem__),
        "table gradients": max(tables.values()),
        "worst table": max(tables, key=tables.__getitem__),
    }


def real_lengths(count: int, *, seed: int, most: int | None = None, users: int = 60) -> list[int]:
    """Lengths of histories of anchors of the made-up log."""
    from freescale.data import AnchorRule, PoolRule, RequestExamples
    from freescale.data.sources.dlrmv4_twin import TwinSource

    source = TwinSource(num_users=users, seed=seed)
    examples = RequestExamples(
        source=source,
        outcomes=("listened",),
        split="train",
        max_length=4087,
        anchors=AnchorRule("listened", 4086, 1),
        pools=PoolRule("action", (1, 2, 4), 1362, 20_000),
    )
    lengths = examples.lengths() - 1
    picked = np.random.default_rng(seed).choice(lengths, count)
    return (picked if most is None else np.maximum(picked * most // 4086, 1)).tolist()


def main() -> None:
    """Compare, print a table, and fail where something is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, type=Path, help="folder recommendation_v4 of a checkout")
    parser.add_argument("--quick", action="store_true", help="short histories only")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(options.peer))
    made = stand_ins()
    for line in made:
        print(f"stood in for {line}")
    short = real_lengths(6, seed=options.seed, most=90)
    cases: list[dict[str, Any]] = [
        {"lengths": short, "dim": 64, "heads": 2, "layers": 3, "dtype": torch.float32},
        {"lengths": short, "dim": 64, "heads": 2, "layers": 3, "dtype": torch.float64},
        {"lengths": short, "dim": 512, "heads": 4, "layers": 3, "dtype": torch.float32},
    ]
    if not options.quick:
        cases += [
            {
                "lengths": real_lengths(3, seed=options.seed),
                "dim": 64,
                "heads": 1,
                "layers": 3,
                "dtype": torch.float32,
            },
            {
                "lengths": real_lengths(2, seed=options.seed),
                "dim": 512,
                "heads": 4,
                "layers": 3,
                "dtype": torch.float32,
            },
        ]
    rows = []
    print(
        f"{'width':>6} {'type':>8} {'last':>6} {'mean length':>12} "
        f"{'predictions':>12} {'loss':>9} {'dense':>9} {'tables':>9}  worst"
    )
    for case in cases:
        for cut in (False, True):
            row = compare(**case, short=cut, seed=options.seed)
            rows.append(row)
            print(
                f"{row['dim']:>6} {row['dtype']:>8} {'short' if cut else 'whole':>6} {row['mean length']:>12.0f} "
                f"{row['predictions']:>12.1e} {row['loss']:>9.1e} {row['dense gradients']:>9.1e} "
                f"{row['table gradients']:>9.1e}  {row['worst weight']}, {row['worst table']}",
                flush=True,
            )
    print(json.dumps({"stood in for": made, "rows": rows}))
    worst = max(
        max(row[name] for name in ("predictions", "loss", "dense gradients", "table gradients"))
        for row in rows
    )
    if worst > 1e-5:
        sys.exit(f"differs from the reference by {worst:.1e}, more than 1e-5")


if __name__ == "__main__":
    main()
