"""Content projections and the text encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freescale.data.batches.vocabulary import NumberedTexts, Vocabulary
from freescale.model.inputs.item_encoders import ContentProjection, TextEncoder

TEXTS = ["red round ball", "red ball", "", "ball round red", "old map of a town"]


def group_index() -> NumberedTexts:
    return NumberedTexts.of(TEXTS, Vocabulary.of_words(TEXTS, min_count=1), max_tokens=9)


def make_encoder(**options):
    torch.manual_seed(0)
    shape = {"vocabulary_size": group_index().vocabulary_size, "dim": 6, "width": 8, "layers": 2, "heads": 2}
    encoder = TextEncoder(**shape | options)
    for param in encoder.parameters():
        param.data.normal_(std=0.5)
    return encoder.double()


def encode(encoder, items):
    return encoder(group_index().batch(np.array(items, dtype=np.int64)))


def test_a_text_has_the_same_vector_whatever_it_is_encoded_with():
    encoder = make_encoder()
    together = encode(encoder, [0, 1, 2, 3, 4])
    for item in range(5):
        torch.testing.assert_close(encode(encoder, [item])[0], together[item])


def test_order_of_words_and_empty_texts_count():
    vectors = encode(make_encoder(), [0, 3, 2])
    assert not torch.allclose(vectors[0], vectors[1])
    assert torch.isfinite(vectors[2]).all()


def test_every_parameter_learns():
    encoder = make_encoder()
    encode(encoder, [0, 1, 2, 3, 4]).square().sum().backward()
    for name, param in encoder.named_parameters():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name
    # All but UNKNOWN occur, so all but its vector have a gradient.
    assert (encoder.pieces.grad.abs().sum(1) > 0).tolist() == [True, False] + [True] * (
        len(encoder.pieces) - 2
    )


def test_no_items_give_no_vectors_and_gradients_of_zero():
    for module, none in (
        (make_encoder(), group_index().batch(np.zeros(0, np.int64))),
        (ContentProjection(width=4, dim=6).double(), torch.zeros(0, 4)),
    ):
        vectors = module(none)
        assert vectors.shape == (0, 6)
        vectors.backward(torch.zeros(0, 6, dtype=torch.float64))
        assert all(param.grad is not None and (param.grad == 0).all() for param in module.parameters())


def test_vectors_start_as_large_as_rows_of_a_table():
    torch.manual_seed(0)
    encoder = TextEncoder(vocabulary_size=300, dim=64, width=32, layers=2, heads=2)
    texts = [" ".join(f"w{n * m % 97}" for m in range(1, 7)) for n in range(200)]
    batch = NumberedTexts.of(texts, Vocabulary.of_bytes(), max_tokens=30).batch(np.arange(200))
    assert encoder(batch).std().item() == pytest.approx(0.02, rel=0.3)
    content = ContentProjection(width=48, dim=64)(37 * torch.randn(200, 48) + 5)
    assert content.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_size_of_content_vectors_does_not_matter():
    project = ContentProjection(width=8, dim=4).double()
    content = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(project(content), project(1000 * content + 7), rtol=1e-3, atol=1e-6)


def test_items_start_with_vectors_of_their_own():
    torch.manual_seed(0)
    texts = [f"w{n} w{n * 7 % 53} w{n * 11 % 97}" for n in range(60)]
    vocabulary = Vocabulary.of_words(texts)
    encoder = TextEncoder(vocabulary_size=vocabulary.size, dim=32, width=32, layers=2, heads=2)
    vectors = encoder(NumberedTexts.of(texts, vocabulary, max_tokens=9).batch(np.arange(60))).detach()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    apart = (unit @ unit.T)[~torch.eye(60, dtype=torch.bool)]
    assert apart.mean().item() < 0.4
