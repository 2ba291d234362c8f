"""How ranks talk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freescale.recipe.keys import extra_keys, key

if TYPE_CHECKING:
    import torch

    from freescale.comm import Transport
    from freescale.comm.traffic import Channels
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
    timeout_s: float = key(600.0, "a collective that takes longer ends the run", at_least=1, free=True)
    extra: Mapping[str, Any] = extra_keys()


def problems(config: Config) -> list[str]:
    """Every mistake in these keys shows in one key alone."""
    return []


def channel(config: Config, ranks: Ranks, *, device: torch.device | str = "cpu") -> Transport:
    """A connection of one's own between the ranks, as the recipe wants rows to travel; recorded."""
    from freescale.comm.traffic import open_channel
    from freescale.comm.transports import TracedTransport

    assert ranks.group is not None
    opened = open_channel(ranks.group, device=device, kind=config.comm.transport, timeout_s=ranks.timeout_s)
    return TracedTransport(opened)


def id_channel(config: Config, ranks: Ranks) -> Transport:
    """How ids travel to their owners while the training thread has traffic of its own under way."""
    from freescale.comm.traffic import kind_for_ids, open_channel
    from freescale.comm.transports import TracedTransport

    assert ranks.group is not None
    kind = config.comm.transport if ranks.device.type == "cpu" else kind_for_ids(config.comm.transport)
    return TracedTransport(open_channel(ranks.group, kind=kind, timeout_s=ranks.timeout_s))


def row_channels(config: Config, ranks: Ranks) -> Channels:
    """The connections of prioritized traffic, their exchanges recorded."""
    from freescale.comm.traffic import Channels, open_channels
    from freescale.comm.transports import TracedTransport

    opened = open_channels(
        ranks.group, device=ranks.device, kind=config.comm.transport, timeout_s=ranks.timeout_s
    )
    bulk = TracedTransport(opened.bulk)
    ids = bulk if opened.ids is opened.bulk else TracedTransport(opened.ids)
    return Channels(express=TracedTransport(opened.express), bulk=bulk, ids=ids)
