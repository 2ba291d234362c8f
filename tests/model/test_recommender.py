"""The model made from kinds: the names of its weights, and who gathers item vectors."""

from __future__ import annotations

import pytest
import torch

from freescale.data.batches.sequence_batch import SequenceBatch
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model.encoder import EncoderShape, compresses
from freescale.model.head import make_head
from freescale.model.recommender import Recommender, make_encoder

SHAPE = {"dim": 4, "layers": 1, "heads": 2, "max_length": 6, "position_bias": True, "time_bias": True}
SEGMENTS = {"recent": 2, "length": 2, "summaries": 1}

# Checkpoints and exports hold these names: another name is another format.
HSTU = """encoder.input.position encoder.layers.0.bias.position encoder.layers.0.bias.time encoder.layers.0.output.bias
    encoder.layers.0.output.weight encoder.layers.0.uvqk"""
SASREC = """encoder.final_norm.bias encoder.final_norm.weight encoder.input.position
    encoder.layers.0.attention_norm.bias encoder.layers.0.attention_norm.weight encoder.layers.0.ffn.0.bias
    encoder.layers.0.ffn.0.weight encoder.layers.0.ffn.3.bias encoder.layers.0.ffn.3.weight
    encoder.layers.0.ffn_norm.bias encoder.layers.0.ffn_norm.weight encoder.layers.0.key.bias
    encoder.layers.0.key.weight encoder.layers.0.merge.bias encoder.layers.0.merge.weight
    encoder.layers.0.query.bias encoder.layers.0.query.weight encoder.layers.0.value.bias
    encoder.layers.0.value.weight"""
LLAMA = """encoder.final_norm.weight encoder.layers.0.attention_norm.weight encoder.layers.0.ffn.w_in
    encoder.layers.0.ffn.w_out encoder.layers.0.ffn_norm.weight encoder.layers.0.merge.weight
    encoder.layers.0.qkv.weight"""
RANKING = " head.mlp.0.bias head.mlp.0.weight head.mlp.2.bias head.mlp.2.weight"


@pytest.mark.parametrize(
    ("kind", "head", "names"),
    [
        ("hstu", "retrieval", HSTU),
        ("hstu", "ranking", HSTU + RANKING),
        ("sasrec", "retrieval", SASREC),
        ("llama", "retrieval", LLAMA),
    ],
)
def test_weights_keep_their_names(kind, head, names):
    model = Recommender(
        encoder=make_encoder(kind, **SHAPE), head=make_head(head, dim=4), items=torch.nn.Linear(2, 4)
    )
    assert sorted(model.without_items().state_dict()) == names.split()
    assert sorted(model.state_dict()) == sorted([*names.split(), "items.bias", "items.weight"])


def test_segments_put_the_encoder_inside_and_add_summaries():
    model = Recommender(
        encoder=make_encoder("hstu", **SHAPE, segments=SEGMENTS), head=make_head("retrieval", dim=4)
    )
    inside = [name.replace("encoder.", "encoder.encoder.", 1) for name in HSTU.split()]
    assert sorted(model.state_dict()) == sorted([*inside, "encoder.summaries"])
    assert compresses(model.encoder)
    assert not compresses(make_encoder("hstu", **SHAPE))


def test_unknown_kinds_and_shapes_are_refused():
    with pytest.raises(ConfigError, match="there is no encoder 'hstoo'") as caught:
        make_encoder("hstoo", **SHAPE)
    assert "did you mean 'hstu'?" in str(caught.value)
    with pytest.raises(ConfigError, match="there is no head 'ranker'"):
        make_head("ranker", dim=4)
    with pytest.raises(ConfigError, match="has no option 'deep'"):
        make_encoder("sasrec", **SHAPE, options={"deep": True})
    with pytest.raises(TypeError, match="width"):
        make_encoder("sasrec", **SHAPE, width=3)


def test_an_encoder_with_from_rows_is_given_rows_and_the_head_what_it_hands_on():
    seen = {}

    class Gathers(torch.nn.Module):
        def from_rows(self, rows, item_index, batch, layout):
            return rows[item_index] + 1, rows * 3

    class Head:
        def loss(self, states, rows, batch, layout):
            seen.update(states=states, rows=rows)
            return states.sum()

    batch = SequenceBatch(offsets=torch.tensor([0, 2]), tokens={"item_index": torch.tensor([1, 0])})
    rows = torch.randn(3, 4)
    model = Recommender(encoder=Gathers(), head=Head())
    assert torch.equal(model.states(rows, batch, SequenceLayout(batch.offsets)), rows[[1, 0]] + 1)
    model(rows, batch)
    assert torch.equal(seen["states"], rows[[1, 0]] + 1)
    assert torch.equal(seen["rows"], rows * 3)


def test_the_shape_has_the_defaults_of_the_classes():
    shape = EncoderShape(dim=4, layers=1)
    assert (shape.heads, shape.max_length, shape.dropout) == (1, 200, 0.0)
    assert (shape.position_bias, shape.time_bias, shape.rope_base) == (True, False, 10_000.0)
