"""A map that learns, as somebody else would write it: ids get the rows of their bucket in the order they come."""

import torch

from freescale.comm.traffic import ask_owners
from freescale.embedding import TableRows
from freescale.kernels.rows import unique
from freescale.registry import register

GROUP, EMPTY = 8, -(2**63)


@register("id_map", "test_first_come")
class FirstCome:
    """Rows are never taken back; the last row of a bucket is shared by those who come too late."""

    learns, guard = True, 10**9

    @staticmethod
    def plan(*, num_items, largest_id, options):
        return TableRows(GROUP * (num_items // 6 + 1), row_group=GROUP)

    @staticmethod
    def build(*, embedding, table, channel, options):
        return FirstCome(embedding, table, channel)

    def __init__(self, embedding, table, channel):
        plan = embedding.plan_of(table)
        self.num_rows = plan.spec.num_rows
        self._buckets, self._share = self.num_rows // GROUP, max(1, plan.block_rows // GROUP)
        self.num_slots = self._buckets * (GROUP - 1)
        self._embedding, self._table, self._channel = embedding, table, channel or embedding.transport
        self._first, held = plan.block(embedding.rank)
        self._ids = torch.full((held // GROUP, GROUP), EMPTY)
        self._counts = {}

    def rows(self, ids, *, step=None):
        asked, inverse = unique(ids.flatten().long())
        owner = lambda keys: keys % self._buckets // self._share  # noqa: E731
        found = ask_owners(
            asked, owner=owner, answer=lambda own: self._answer(own, step), channel=self._channel
        )
        return found[inverse].view(ids.shape)

    def _answer(self, ids, step):
        rows, new = [], 0
        for id_ in ids.tolist():
            bucket = self._ids[id_ % self._buckets - self._first // GROUP, : GROUP - 1]
            slot = next((n for n, other in enumerate(bucket.tolist()) if other in (id_, EMPTY)), GROUP - 1)
            if slot < GROUP - 1 and int(bucket[slot]) == EMPTY and step is None:
                slot = GROUP - 1
            elif slot < GROUP - 1 and int(bucket[slot]) == EMPTY:
                bucket[slot], new = id_, new + 1
                row = torch.tensor([id_ % self._buckets * GROUP + slot - self._first])
                self._embedding.tables[self._table].reset(row, torch.tensor([id_]))
            rows.append(id_ % self._buckets * GROUP + slot)
        shared = sum(row % GROUP == GROUP - 1 for row in rows)
        if step is not None:
            taken = int((self._ids != EMPTY).sum())
            self._counts[step] = torch.tensor([len(rows), len(rows) - new - shared, new, 0, shared, 0, taken])
        return torch.tensor(rows, dtype=torch.int64)

    def take_counts(self, step):
        return self._counts.pop(step)

    def take_evicted(self):
        return torch.zeros(0, dtype=torch.int64)

    def stats(self):
        return {"occupied": int((self._ids != EMPTY).sum())}

    def residents(self):
        at = (self._ids.flatten() != EMPTY).nonzero().flatten()
        ids, order = self._ids.flatten()[at].sort()
        return ids, at[order] + self._first

    def state_dict(self):
        return {"ids": self._embedding.global_view(self._table, self._ids, grouped=True)}

    def restored(self):
        self._counts = {}
