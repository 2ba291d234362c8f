"""Attention of 1,000 candidates beside generative-recommenders' kernels: whole histories, and cached ones.

    PYTHONPATH=. python benchmarks/ranking_peers.py --peer DIR [--events 1024 4096] [--users 1 8]

DIR is a checkout of generative-recommenders; its Triton kernels need neither fbgemm nor torchrec. One layer's attention
without bias, which the peer does not have, 4 heads of width 128, bf16. Checked against float64 first. Three rounds, in
turn; each call is replayed as a CUDA graph. The peer tunes over a part of its settings (`--configs`), since all of them
take minutes to compile. Its cached kernel wants keys and values of history and candidates in one tensor; the copy that
puts them there is counted apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranking_requests import relative, replayed, timed_ms
from freescale.data import SequenceBatch
from freescale.kernels import AttentionMask, SequenceLayout, hstu_attention
from freescale.model.serving.history_cache import HistoryCache, HistoryCaches
from freescale.model.views.cached_view import CachedView

HEADS, WIDTH, SHOWN = 4, 128, 1000


class Case:
    """Requests of so many users with so many events, all but the latest of which are cached."""

    def __init__(self, *, users: int, events: int) -> None:
        self.users, self.events, self.each = users, events, events + SHOWN
        draw = torch.Generator(device="cuda").manual_seed(0)
        shape = (3, users * self.each, HEADS, WIDTH)
        self.q, self.k, self.v = torch.randn(
            shape, device="cuda", generator=draw, dtype=torch.bfloat16
        ).unbind(0)
        self.offsets = torch.arange(users + 1) * self.each
        self.targets = torch.full((users,), SHOWN)
        self.scale, self.alpha = 1 / self.each, WIDTH**-0.5
        index = torch.arange(users * self.each, device="cuda").view(users, -1)
        self.shown, self.old = index[:, events:].flatten(), index[:, : events - 1].flatten()
        self.new = index[:, events - 1 :].flatten()

    def truth(self) -> Tensor:
        """Candidates of the last user in float64, by plain products."""
        own = slice((self.users - 1) * self.each, None)
        q, k, v = (x[own].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        past = torch.nn.functional.silu(
            self.alpha * q[:, self.events :] @ k[:, : self.events].transpose(1, 2)
        )
        itself = torch.nn.functional.silu(self.alpha * (q * k)[:, self.events :].sum(-1, keepdim=True))
        out = past @ v[:, : self.events] + itself * v[:, self.events :]
        return (out * self.scale).transpose(0, 1)

    def ours(self) -> dict[str, Callable[[], Tensor]]:
        """Whole histories, all rows and those of candidates alone; and cached ones."""
        layout = SequenceLayout(self.offsets, device="cuda")
        masks = [AttentionMask(targets=self.targets, only_targets=only) for only in (False, True)]
        old = [x[self.old].unflatten(0, (self.users, -1)) for x in (self.k, self.v)]
        caches = [HistoryCache(keys=k[None], values=v[None], times=None) for k, v in zip(*old)]
        store = HistoryCaches(caches, device=torch.device("cuda"))
        batch = SequenceBatch(offsets=torch.arange(self.users + 1) * (SHOWN + 1), targets=self.targets)
        view = CachedView(batch, store, device=torch.device("cuda"))
        q, k, v = (x[self.new] for x in (self.q, self.k, self.v))
        q = q * self.alpha

        def whole(mask: AttentionMask) -> Tensor:
            options: dict[str, Any] = {"scale": self.scale, "alpha": self.alpha, "layout": layout}
            out = hstu_attention(self.q, self.k, self.v, self.offsets, mask=mask, **options)
            return out[-SHOWN:]

        return {
            "freescale, whole history": lambda: whole(masks[0]),
            "freescale, candidates' rows": lambda: whole(masks[1]),
            "freescale, cached": lambda: view.silu(q, k, v, layer=0, scale=self.scale)[-SHOWN:],
        }

    def peer(self) -> dict[str, Callable[[], Tensor]]:
        """The same by the peer's kernels."""
        from generative_recommenders.ops.triton import triton_hstu_attention as theirs

        offsets, targets = self.offsets.cuda(), self.targets.cuda()
        q = self.q[self.shown].contiguous()
        most = self.each
        fresh = [x[self.shown] for x in (self.k, self.v)]
        joined = [self.k.clone(), self.v.clone()]

        def cached() -> Tensor:
            out = theirs.triton_cached_hstu_mha(most, self.alpha, q, *joined, offsets, targets)
            return out[-SHOWN:]

        def with_copy() -> Tensor:
            for room, values in zip(joined, fresh):
                room.index_copy_(0, self.shown, values)
            return cached()

        def whole() -> Tensor:
            out = theirs.triton_hstu_mha(most, self.alpha, self.q, self.k, self.v, offsets, targets)
            return out[-SHOWN:]

        return {
            "generative-recommenders, whole history": whole,
            "generative-recommenders, cached": cached,
            "generative-recommenders, cached and copied": with_copy,
        }


def few_configs(wanted: list[str]) -> None:
    """Let the peer tune over settings such as 128x64x8 (queries x keys x warps) alone."""
    from generative_recommenders.ops.triton import triton_hstu_attention as theirs

    tuner = theirs._hstu_attn_fwd
    tuner.configs = [
        each
        for each in tuner.configs
        if f"{each.kwargs['BLOCK_M']}x{each.kwargs['BLOCK_N']}x{each.num_warps}" in wanted
    ]
    print(f"the peer tunes over {len(tuner.configs)} settings", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="checkout of generative-recommenders")
    parser.add_argument("--events", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--users", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--configs", nargs="*", default=["64x64x4", "128x64x8", "128x32x8", "128x64x4"])
    args = parser.parse_args()
    if args.peer:
        sys.path.insert(0, args.peer)
        few_configs(args.configs)
    rows = []
    for events in args.events:
        for users in args.users:
            case = Case(users=users, events=events)
            with torch.no_grad():
                calls = case.ours() | (case.peer() if args.peer else {})
                wanted = case.truth()
                errors = {name: relative(call(), wanted) for name, call in calls.items()}
                bad = [name for name, error in errors.items() if not error < 2e-2]
                for name in bad:
                    print(f"{name}: error {errors[name]:.1e}, not timed")
                runs = {name: replayed(call, "cuda") for name, call in calls.items() if name not in bad}
                times: dict[str, list[float]] = {name: [] for name in runs}
                for _ in range(3):
                    for name, run in runs.items():
                        times[name] += timed_ms(run, device="cuda", repeats=20, rounds=1)
            for name, ms in times.items():
                rows.append({"events": events, "users": users, "what": name, "ms": ms, "error": errors[name]})
                rounds = ", ".join(f"{x:.4f}" for x in ms)
                what = f"{events:5} events, {users} x {SHOWN}, {name:42}"
                print(
                    f"{what} {statistics.median(ms):8.4f} ms ({rounds}), error {errors[name]:.1e}", flush=True
                )
    import triton

    print(json.dumps({"rows": rows, "torch": torch.__version__, "triton": triton.__version__}))


if __name__ == "__main__":
    main()
