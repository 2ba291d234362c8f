"""An encoder of your own: GRU4Rec (arXiv 1511.06939), trained, exported and asked.

python examples/own_gru4rec.py [FOLDER]        or: torchrun --nproc-per-node 2 examples/own_gru4rec.py FOLDER
"""

import os
import sys
import tempfile

import torch
from torch import nn

from freescale import Dropout, Table, Trainer, load_export

DIM = 16


class GRU4Rec(nn.Module):
    """One state a token, from a recurrent layer over each history."""

    def __init__(self, dim, dropout=0.1):
        super().__init__()
        self.gru, self.out = nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, dim)
        self.drop = Dropout(dropout, rows="padded")  # its masks follow the sample, not the rank

    def forward(self, vectors, batch, layout):  # [T, D] vectors of all tokens -> [T, D] states
        padded = nn.utils.rnn.pad_sequence(vectors.split(batch.lengths.tolist()), batch_first=True)
        states, _ = self.gru(self.drop(padded))
        inside = torch.arange(padded.shape[1]) < batch.lengths[:, None]
        return self.out(states[inside.to(vectors.device)])


def trainer(folder, **recipe):
    return Trainer(
        encoder=lambda: GRU4Rec(DIM),  # made when run.seed is set; an object keeps the weights it has
        tables=[Table("item", dim=DIM, map="zero_collision", lr=0.02)],
        recipe={
            "run": {"out": f"{folder}/run", "steps": 40, "eval_every": 20, "log_every": 10},
            "synthetic": {"users": 400, "items": 100},
            "data": {"max_length": 40, "global_batch": 32},
            "optim.lr": 0.01,
            **recipe,
        },
    )


def main(folder):
    training = trainer(folder)
    print(training.check())
    training.fit()
    training.export(f"{folder}/export")
    if os.environ.get("RANK", "0") == "0":
        model = load_export(f"{folder}/export", encoder=GRU4Rec(DIM))
        print("after [31, 7, 12]:", model.recommend([31, 7, 12], k=5))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
