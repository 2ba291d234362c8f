"""A Transformer straight from torch.nn as the encoder.

python examples/own_transformer.py [FOLDER]
"""

import sys
import tempfile

import torch
from torch import nn

from freescale import Dropout, Trainer, load_export

DIM, LONGEST = 16, 40


class Transformer(nn.Module):
    """Causal layers over padded histories; pads stand behind, where no event looks."""

    def __init__(self, dim=DIM, layers=2, heads=2, longest=LONGEST, dropout=0.1):
        super().__init__()
        self.position = nn.Embedding(longest, dim)
        self.drop = Dropout(dropout, rows="padded")
        # torch's own dropout draws masks by rank: 0 here, and freescale.Dropout instead
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, vectors, batch, layout):
        padded = nn.utils.rnn.pad_sequence(vectors.split(batch.lengths.tolist()), batch_first=True)
        places = torch.arange(padded.shape[1], device=vectors.device)
        hidden = places[:, None] < places  # True: not seen
        states = self.layers(self.drop(padded + self.position(places)), mask=hidden, is_causal=True)
        return states[(places.cpu() < batch.lengths[:, None]).to(vectors.device)]


def trainer(folder, **recipe):
    return Trainer(
        encoder=lambda: Transformer(),  # made anew for every run, after run.seed was set
        recipe={
            "run": {"out": f"{folder}/run", "steps": 40, "eval_every": 20, "log_every": 10},
            "synthetic": {"users": 400, "items": 100},
            "data": {"max_length": LONGEST, "global_batch": 32},
            "model.dim": DIM,
            **recipe,
        },
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    training = trainer(folder)
    training.fit()
    model = load_export(training.export(f"{folder}/export"), encoder=Transformer())
    print("after [31, 7, 12]:", model.recommend([31, 7, 12], k=5))
