"""Which weight of the reference is which of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dlrmv4_parts.ours import Ours
from dlrmv4_parts.reference import Theirs


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
