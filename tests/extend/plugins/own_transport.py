"""A transport from outside the package: rows travel in one message a pair of ranks, over the group's own sends."""

import torch
import torch.distributed as dist

from freescale import register


class PairsTransport:
    """Uneven all-to-all by isend and irecv; CPU tensors only."""

    name, engine, sm_free, reason = "pairs", "gloo", True, "the CPU sends and receives"

    def __init__(self, group):
        self.num_ranks, self.rank, self._group = dist.get_world_size(group), dist.get_rank(group), group

    def start(self, tensor, *, send, receive):
        out = list(tensor.contiguous().split(list(send)))
        into = [tensor.new_empty(count, *tensor.shape[1:]) for count in receive]
        into[self.rank] = out[self.rank]
        works = []
        for rank in range(self.num_ranks):
            if rank != self.rank:
                peer = dist.get_global_rank(self._group, rank)
                works += [dist.isend(out[rank], peer, group=self._group)] if len(out[rank]) else []
                works += [dist.irecv(into[rank], peer, group=self._group)] if len(into[rank]) else []
        return _Pending(works, into, out)


class _Pending:
    def __init__(self, works, into, out):
        self._works, self._into, self._out = works, into, out

    def wait(self):
        for work in self._works:
            work.wait()
        return torch.cat(self._into)


@register("transport", "pairs")
class Pairs:
    """Who can use it, and how it is opened."""

    @staticmethod
    def why_not(facts):
        return "it carries CPU tensors only" if facts.on_gpu else None

    @staticmethod
    def build(group, facts, timeout_s):
        return PairsTransport(group)
