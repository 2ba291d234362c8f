"""Kernels over padded batches: what they compute does not depend on pads, and follows the lists in memory.

A recorded step starts kernels for one batch and replays them over lists of another that were copied over the first. So
here, too: a layout is made for one batch, its memory is overwritten with the lists of the next, and the kernels that
are started with the layout must compute the next.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from freescale.data import SequenceBatch
from freescale.kernels import (
    LayoutRoom,
    LayoutWishes,
    SequenceLayout,
    hstu_attention,
    input_states,
    sampled_softmax,
)
from freescale.kernels.attention import BIAS_ROWS
from freescale.kernels.attention.triton import bias_gradients
from freescale.pipeline import Padder

CPU = torch.device("cpu")
LONGEST, WIDTH, HEADS, ROWS, NEGATIVES = 140, 16, 1, 40, 6
LENGTHS = ([70, 0, 3], [1, 60, 13])


def make_batch(lengths, seed):
    draws = np.random.default_rng(seed)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    tokens = int(offsets[-1])
    item, target = (torch.from_numpy(draws.integers(0, ROWS, tokens)) for _ in range(2))
    negatives = torch.from_numpy(draws.integers(0, ROWS, (len(lengths), NEGATIVES)))
    times = torch.from_numpy(np.sort(draws.integers(0, 10**6, tokens)))
    return SequenceBatch(
        offsets,
        {"item": item, "target": target, "time": times},
        {"row": torch.arange(3), "negatives": negatives},
    )


def sent(padder, batch):
    indexed = batch.with_tokens(item_index=batch.tokens["item"], target_index=batch.tokens["target"])
    indexed = indexed.with_samples(negative_index=batch.samples["negatives"])
    return padder.pad(indexed, {"item": torch.arange(ROWS)}, global_tokens=1)


def computed(layout, tokens, negatives, *, num_real):
    """Attention, input and loss with all their gradients, for numbers that only depend on the place of a token."""
    draws = torch.Generator().manual_seed(3)
    size = layout.num_tokens

    def numbers(*shape):
        real = torch.randn(250, *shape, generator=draws)[:num_real]
        # Pads are finite in every tensor of a step; what they are must not matter.
        return torch.cat([real, torch.full((size - num_real, *shape), 5.0)]).requires_grad_()

    q, k, v = (numbers(HEADS, WIDTH) for _ in range(3))
    tables = [torch.linspace(-1, 1, n).requires_grad_() for n in (LONGEST, 129)]
    times = {"query_time": tokens["time"] + 9, "key_time": tokens["time"]}
    attended = hstu_attention(
        *(q, k, v, layout.offsets),
        scale=0.1,
        position_bias=tables[0],
        time_bias=tables[1],
        layout=layout,
        backend="triton",
        **times,
    )
    seed = numbers(HEADS, WIDTH).detach()
    seed[num_real:] = 0  # as the gradients of pads are
    found = list(torch.autograd.grad((attended * seed).sum(), [q, k, v, *tables]))
    rows = torch.randn(ROWS, WIDTH, generator=draws)
    rows = torch.cat([rows, torch.full((1, WIDTH), 3.0)]).requires_grad_()
    position = torch.randn(LONGEST, WIDTH, generator=draws).requires_grad_()
    states, past = input_states(rows, tokens["item_index"], position, layout, scale=2.0, fused=True)
    loss = sampled_softmax(
        states, past, tokens["target_index"], negatives, layout, temperature=0.5, normalize=True, fused=True
    )
    d_rows, d_position = torch.autograd.grad(loss, [rows, position])
    own = [x[:num_real] if len(x) == size else x for x in (attended, states, *found)]
    assert not attended[num_real:].any()
    assert not any(x[num_real:].any() for x in found[:3])
    # What pads name has no gradient, either: where item vectors are made from features, weights would learn from it.
    assert not d_rows[ROWS:].any()
    return [*(x.detach() for x in own), loss.detach(), d_rows[:ROWS], d_position]


def plain(batch):
    layout = SequenceLayout(batch.offsets)
    tokens = {"item_index": batch.tokens["item"], "target_index": batch.tokens["target"], **batch.tokens}
    return computed(layout, tokens, batch.samples["negatives"], num_real=batch.num_tokens)


@pytest.fixture(autouse=True, scope="module")
def poison():
    """Uninitialised memory is full of NaN."""
    # What torch.use_deterministic_algorithms does, without its import of the compiler: that takes ten seconds.
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def padder(poison):
    """One that has seen what the kernels ask for."""
    padder = Padder(CPU, longest=LONGEST, table_rows={"item": ROWS})
    batch = make_batch(LENGTHS[0], 1)
    views = sent(padder, batch).views
    computed(
        views.layout, views.batch.tokens, views.batch.samples["negative_index"], num_real=batch.num_tokens
    )
    again = sent(padder, batch)
    again.replayed.add(again.key)
    assert sent(padder, make_batch(LENGTHS[0], 3)).sent is None, "by now it is known what is wanted"
    return padder


@pytest.mark.slow
def test_kernels_compute_the_batch_whose_lists_lie_in_memory(padder):
    batches = [make_batch(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    made = [sent(padder, batch) for batch in batches]
    assert len({padded.key for padded in made}) == 1
    memory = torch.empty(made[0].num_bytes, dtype=torch.uint8)
    for batch, padded in zip(batches, made):
        # A layout of the first batch; new each time, as a recording remembers nothing that was worked out before.
        static = made[0].again(memory).views
        static.layout.seal()
        memory.copy_(padded.memory[0][: padded.num_bytes])
        ours = computed(
            static.layout,
            static.batch.tokens,
            static.batch.samples["negative_index"],
            num_real=batch.num_tokens,
        )
        for got, want in zip(ours, plain(batch), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_padded_batch_with_more_pairs_than_are_kept_is_cut_like_a_plain_one(monkeypatch):
    """Its lists have no fixed size, and it is not replayed; nothing is worked out twice for that."""
    lengths, kept = [130, 5, 110], 4  # pairs of blocks: 3, 1, 1
    monkeypatch.setattr(bias_gradients, "SCORE_BYTES", kept * 4 * HEADS * BIAS_ROWS**2)
    batch = make_batch(lengths, 7)
    room = LayoutRoom(tokens=batch.num_tokens + 9, longest=LONGEST)
    layout = SequenceLayout(batch.offsets, room=room, wishes=LayoutWishes())
    indices = {f"{name}_index": batch.tokens[name] for name in ("item", "target")}
    padded = {name: F.pad(x, (0, 9)) for name, x in {**batch.tokens, **indices}.items()}
    ours = computed(layout, padded, batch.samples["negatives"], num_real=batch.num_tokens)
    assert len(layout.work.parts(None, room=kept * BIAS_ROWS**2)) == 2
    for got, want in zip(ours, plain(batch), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_sealed_layout_refuses_lists_that_do_not_travel(padder):
    batch = make_batch(LENGTHS[0], 1)
    views = Padder(CPU, longest=LONGEST, table_rows={"item": ROWS})
    layout = sent(views, batch).views.layout
    layout.seal()
    with pytest.raises(RuntimeError, match="does not travel"):
        layout.token_tiles(64)
    with pytest.raises(RuntimeError, match="does not travel"):
        layout.work.tiles("queries", block=64, other=64, mask=None)
    with pytest.raises(ValueError, match="do not fit"):
        SequenceLayout(batch.offsets, room=LayoutRoom(tokens=batch.num_tokens - 1, longest=LONGEST))


def test_padded_lists_of_tokens_are_the_plain_ones():
    offsets = torch.tensor([0, 0, 5, 70, 70, 198])
    room = LayoutRoom(tokens=300, longest=150)
    plain_, padded = SequenceLayout(offsets), SequenceLayout(offsets, room=room)
    tiles = plain_.token_tiles(64)
    assert torch.equal(padded.token_tiles(64)[: len(tiles)], tiles)
    assert not padded.token_tiles(64)[len(tiles) :].any()
    for mine, theirs in zip(padded.by_length, plain_.by_length):
        assert torch.equal(mine[: len(theirs)], theirs)
        assert not mine[len(theirs) :].any()
    assert torch.equal(padded.positions[:198], plain_.positions)
    assert not padded.positions[198:].any()
