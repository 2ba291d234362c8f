"""How ranks talk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freescale.recipe.reading.keys import extra_keys, key

if TYPE_CHECKING:
    import torch

    from freescale.comm import Transport
    from freescale.comm.traffic import Channels, NodeGroups
    from freescale.comm.world import Ranks
    from freescale.recipe.config import Config


@dataclass(frozen=True, kw_only=True)
class CommSection:
    """How ranks talk."""

    transport: str = key(
        "auto",
        "route of the embedding exchange; auto picks by device and machine and says why",
        free=True,
        family="transport",
        besides=("auto",),
    )
    ids: str = key(
        "auto",
        "route of ids, their counts and bits about them between hosts; auto takes two_stage where 16 ranks or "
        "more are on nodes with equally many each, and otherwise goes as other CPU values do",
        free=True,
        family="transport",
        besides=("auto",),
    )
    sums: str = key(
        "auto",
        "route of dense gradients; auto: the group of the ranks adds them up where it can (NCCL; gloo between "
        "machines), else they go as rows do",
        free=True,
        family="transport",
        besides=("auto",),
    )
    dedup: Literal["rank", "node"] = key(
        "rank",
        "rows are asked for, and gradients sent, once a rank; or once a node, by one of its ranks for all of them",
        free=True,
    )
    timeout_s: float = key(600.0, "a collective that takes longer ends the run", at_least=1, free=True)
    silent_s: float = key(
        25.0, "a rank that gives no sign of life for so long ends the run", at_least=2, free=True
    )
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """Every mistake in these keys shows in one key alone."""
    return []


def channel(config: Config, ranks: Ranks, *, device: torch.device | None = None) -> Transport:
    """A connection of one's own between the ranks, as the recipe wants rows to travel; recorded.

    Without a device it carries ids, and what is told about them, from the CPU.
    """
    from freescale.comm.traffic import open_channel, open_ids_channel
    from freescale.comm.transports import TracedTransport

    assert ranks.group is not None
    how: dict[str, Any] = {"kind": config.comm.transport, "timeout_s": ranks.timeout_s}
    if device is None:
        return TracedTransport(open_ids_channel(ranks.group, device=ranks.device, ids=config.comm.ids, **how))
    return TracedTransport(open_channel(ranks.group, device=device, **how))


def row_channels(config: Config, ranks: Ranks, nodes: NodeGroups | None = None) -> Channels:
    """The connections of prioritized traffic, their exchanges recorded; with `nodes` rows travel once a node."""
    from freescale.comm.traffic import open_channels

    opened = open_channels(
        ranks.group,
        device=ranks.device,
        kind=config.comm.transport,
        ids=config.comm.ids,
        timeout_s=ranks.timeout_s,
        nodes=nodes,
    )
    return _recorded(opened)


def _recorded(opened: Channels) -> Channels:
    from freescale.comm.traffic import Channels
    from freescale.comm.transports import TracedTransport

    bulk = TracedTransport(opened.bulk)
    ids = bulk if opened.ids is opened.bulk else TracedTransport(opened.ids)
    inside = None if opened.inside is None else _recorded(opened.inside)
    return Channels(express=TracedTransport(opened.express), bulk=bulk, ids=ids, inside=inside)
