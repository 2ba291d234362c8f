"""DLRMv4's model against plain formulas: one sample at a time, nothing deduplicated, nothing fused, nothing shared."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from freescale.data import FIRST, SLOT, SequenceBatch, checked_schema, parse_tasks
from freescale.errors import ConfigError
from freescale.kernels import SequenceLayout
from freescale.model import STU, ContextTokens, ItemTowers, Recommender, TasksHead, dropout_keys

DIM, WIDTH, FRONT = 8, 6, ("user", "user_x_artist")
SCHEMA = checked_schema(
    {
        "item": {"of": "event", "is": "id"},
        "time": {"of": "event", "is": "time"},
        "artist": {"of": "item", "is": "id"},
        "album": {"of": "item", "is": "id"},
        "action": {"of": "event", "is": "bits", "names": ["heard", "liked"], "outcome": True},
        "user": {"of": "user", "is": "id"},
        "user_x_artist": {"cross": ["user", "artist"], "rows": 9, "as": "front"},
    },
    where="a test",
)


def model(*, short=True, layers=2, dropout=0.0):
    torch.manual_seed(3)
    widths = dict.fromkeys(SCHEMA.tables, WIDTH)
    made = Recommender(
        encoder=STU(
            dim=DIM, layers=layers, heads=2, length=20, front=2, positions=11, time_buckets=6, short=short,
            dropout=dropout, input_dropout=dropout,
        ),
        head=TasksHead(dim=DIM, tasks=parse_tasks(["heard = heard > 0 weight 0.2"]), towers="product", hidden=5),
        items=ItemTowers(
            [SCHEMA[name] for name in ("item", "artist", "album")], widths=widths, dim=DIM, hidden=7, judged=5
        ),
        tokens=ContextTokens([SCHEMA[name] for name in ("action", *FRONT)], widths=widths, dim=DIM, hidden=7),
    ).double()  # fmt: skip
    with torch.no_grad():
        for param in made.parameters():  # ones and zeros would hide what they are multiplied with
            param.add_(torch.randn_like(param) * 0.1)
    return made


def inputs(lengths=(5, 0, 13), targets=(1, 1, 1), seed=0):
    """Rows of tables, and a batch that points to them."""
    draws = torch.Generator().manual_seed(seed)
    rows = {
        name: torch.randn(9, WIDTH, generator=draws, dtype=torch.float64).requires_grad_()
        for name in ("item", "artist", "album", *FRONT)
    }
    sizes = torch.tensor(lengths) + torch.tensor(targets)
    total, batch = int(sizes.sum()), len(lengths)
    times = [torch.randint(400, (int(n),), generator=draws).cumsum(0) + 1_650_000_000 for n in sizes]
    for time, k in zip(times, targets):
        time[len(time) - k :] = time[len(time) - k - 1] if len(time) > k else time[0]
    made = SequenceBatch(
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
        tokens={
            "item_index": torch.randint(9, (total,), generator=draws),
            "time": torch.cat(times),
            "target_time": torch.cat([time[-1:].expand(len(time)) for time in times]),
            "action": torch.randint(4, (total,), generator=draws),
            "label_heard": torch.randint(2, (total,), generator=draws).float(),
        },
        samples={
            "row": torch.arange(batch),
            **{name + SLOT: torch.randint(9, (batch,), generator=draws) + FIRST for name in FRONT},
        },
        items={name + SLOT: torch.randint(9, (9,), generator=draws) + FIRST for name in ("artist", "album")}
        | {"item" + SLOT: torch.arange(9) + FIRST},
        targets=torch.tensor(targets),
    )
    return rows, made


def ours(made, rows, batch):
    layout = SequenceLayout(batch.offsets, device=torch.device("cpu"))
    vectors = made.items(batch.items, rows)
    states, vectors = made.encode(vectors, batch, layout, {name: rows[name] for name in FRONT})
    return states, made.head.loss(states, vectors, batch, layout)


def plain_mlp(x, mlp):
    first, swish, second, *norm = mlp
    x = F.linear(x, first.weight, first.bias)
    x = x * torch.sigmoid(F.layer_norm(x, x.shape[-1:], swish.norm.weight, swish.norm.bias, 1e-5))
    x = F.linear(x, second.weight, second.bias)
    return F.layer_norm(x, x.shape[-1:], norm[0].weight, norm[0].bias, 1e-5) if norm else x


def plain(made, rows, batch):
    """States and loss of the candidates, one sample after the other."""
    items, tokens, encoder, head = made.items, made.tokens, made.encoder, made.head
    states, losses = [], []
    slots = {name: batch.items[name + SLOT] - FIRST for name in ("item", "artist", "album")}
    for n in range(len(batch)):
        own = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
        index = batch.tokens["item_index"][own]
        k, length = int(batch.targets[n]), len(index)
        parts = {name: rows[name][slots[name][index]] for name in slots}
        both = torch.cat([parts["artist"], parts["album"]], dim=1)
        x = plain_mlp(parts["item"], items.own) + plain_mlp(both, items.others)
        action = batch.tokens["action"][own]
        bits = torch.stack([(action >> bit) & 1 for bit in range(2)], dim=1)
        coded = (bits[:, :, None] * tokens.bits).reshape(length, -1)
        coded = torch.cat([coded[: length - k], tokens.blank.expand(k, -1)])
        x = x + plain_mlp(coded, tokens.of_bits)
        front = [
            F.linear(rows[name][batch.samples[name + SLOT][n] - FIRST], part.weight, part.bias)
            for name, part in zip(FRONT, tokens.front)
        ]
        x = torch.cat([torch.stack(front), x]) * math.sqrt(DIM)
        events = length - k
        time = batch.tokens["time"][own]
        for t in range(len(x)):
            place = t if t < 2 else min(events + 2 - min(t, events + 2) + 2, 10)
            bucket = 6 if t < 2 else min(int(max(float(time[-1] - time[t - 2]), 1e-6) / 60) ** 0.5 // 1, 6)
            x = x.index_add(
                0, torch.tensor([t]), (encoder.input.position[place] + encoder.input.time[int(bucket)])[None]
            )
        sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        sees[2 + events :, 2 + events :] = torch.eye(k, dtype=torch.bool)
        for layer in encoder.layers:
            normed = F.layer_norm(x, (DIM,), layer.norm, layer.norm_bias, 1e-6)
            u, v, q, key = (normed @ layer.uvqk + layer.uvqk_bias).chunk(4, dim=1)
            attended = []
            for head_number in range(2):
                part = slice(4 * head_number, 4 * head_number + 4)
                scores = F.silu(q[:, part] @ key[:, part].t() / math.sqrt(4)) / 20
                attended.append(scores.masked_fill(~sees, 0.0) @ v[:, part])
            a = torch.cat(attended, dim=1)
            gated = F.silu(u) * F.layer_norm(a, (DIM,), layer.gate, layer.gate_bias, 1e-6)
            x = x + torch.cat([F.silu(u), a, gated], dim=1) @ layer.output.t()
        for t in range(length - k, length):
            hour, day = (float(time[t]) // 3600) % 24, (float(time[t]) // 86_400) % 7
            turns = [hour / 24 * 6.28, day / 7 * 6.28]
            told = torch.tensor(
                [f(turn) for turn in turns for f in (math.cos, math.sin)], dtype=torch.float64
            )
            state = encoder.output(torch.cat([x[t + 2], told]))
            state = F.layer_norm(state, (DIM,), encoder.norm.weight, encoder.norm.bias, 1e-5)
            states.append(state)
            whole = torch.cat([parts["item"][t], both[t]])
            logit = plain_mlp((state * plain_mlp(whole, items.judged))[None], head.towers[0])[0, 0]
            label = batch.tokens["label_heard"][own][t].double()
            losses.append(F.binary_cross_entropy_with_logits(logit, label))
    return torch.stack(states), 0.2 * torch.stack(losses).mean()


@pytest.mark.parametrize("targets", [(1, 1, 1), (3, 1, 2)])
@pytest.mark.parametrize("short", [True, False])
def test_it_computes_the_plain_formulas(short, targets):
    made, (rows, batch) = model(short=short), inputs(targets=targets)
    expected, expected_loss = plain(made, rows, batch)
    given = [*made.parameters(), *rows.values()]
    wanted = torch.autograd.grad(expected_loss, given, allow_unused=True)
    states, loss = ours(made, rows, batch)
    # Hours and times are taken in single precision.
    torch.testing.assert_close(states, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-7, atol=1e-8)
    for found, other in zip(torch.autograd.grad(loss, given, allow_unused=True), wanted):
        if other is not None:
            torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-7)


def test_a_short_last_layer_is_the_whole_one_with_dropout_too():
    rows, batch = inputs()
    found = []
    for short in (True, False):
        made = model(short=short, dropout=0.3).train()
        with dropout_keys(seed=1, step=4, batch=batch):
            states, loss = ours(made, rows, batch)
        found.append([states, loss, *torch.autograd.grad(loss, [*made.parameters(), *rows.values()])])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_other_samples_and_outcomes_of_candidates_change_nothing():
    made, (rows, batch) = model(), inputs()
    states, _ = ours(made, rows, batch)
    changed = batch.tokens["action"].clone()
    changed[batch.offsets[1:] - 1] = 3 - changed[batch.offsets[1:] - 1]
    again, _ = ours(made, rows, batch.with_tokens(action=changed))
    assert torch.equal(states, again)


def test_what_it_cannot_read_is_refused():
    price = checked_schema(
        {"item": {"of": "event", "is": "id"}, "price": {"of": "item", "is": "number"}}, where="x"
    )
    with pytest.raises(ConfigError, match="must be ids"):
        ItemTowers([price["item"], price["price"]], widths={"item": 4}, dim=4, hidden=4, judged=4)
    hour = checked_schema({"hour": {"of": "event", "is": "id", "values": ["a"]}}, where="x")
    with pytest.raises(ConfigError, match="reads bits of events"):
        ContextTokens([hour["hour"]], widths={"hour": 4}, dim=4, hidden=4)
