"""A data set given as plain lists."""

from __future__ import annotations

import numpy as np

from freescale.data.source import Histories, ItemCatalog


class ListSource:
    """Histories given as lists of items; time stamp = 100 * position + item, action = item / 2."""

    name = "lists"

    def __init__(self, histories, features=("item", "time", "action")):
        self.histories, self.features = histories, features

    @property
    def lengths(self):
        return np.array([len(h) for h in self.histories], dtype=np.int64)

    @property
    def groups(self):
        return np.array([len(self.histories)])

    @property
    def items(self):
        ids, counts = np.unique([i for h in self.histories for i in h], return_counts=True)
        training = [i for h in self.histories for i in h[:-2]]
        train_counts = np.array([training.count(i) for i in ids])
        return ItemCatalog(ids=ids.astype(np.int64), counts=counts, train_counts=train_counts)

    def read(self, rows):
        chosen = [self.histories[r] for r in rows]
        offsets = np.cumsum([0, *(len(h) for h in chosen)]).astype(np.int64)
        item = np.array([i for h in chosen for i in h], dtype=np.int64)
        time = np.array([100 * n + i for h in chosen for n, i in enumerate(h)], dtype=np.int64)
        columns = {"item": item, "time": time, "action": item / 2}
        users = np.asarray(rows, dtype=np.int64)
        return Histories(users=users, offsets=offsets, columns={f: columns[f] for f in self.features})
