"""A ranking loss of your own over our HSTU: BPR-max (arXiv 1706.03847).

python examples/own_loss.py [FOLDER]
"""

import sys
import tempfile

import torch
from torch.nn import functional as F

from freescale import Trainer, load_export
from freescale.model import RetrievalHead


class BprMax(RetrievalHead):
    """Each target against the negatives of its sample, the strongest weighted most; a SUM over the targets."""

    def __init__(self, penalty=0.5):
        super().__init__(normalize=False)
        self.penalty = penalty

    def loss(self, states, rows, batch, layout):
        users, items = self.queries(states), self.candidates(rows)
        sample = torch.arange(len(batch)).repeat_interleave(batch.lengths).to(states.device)
        right = (users * items[batch.tokens["target_index"]]).sum(-1, keepdim=True)
        wrong = torch.einsum("td,tnd->tn", users, items[batch.samples["negative_index"][sample]])
        weight = wrong.softmax(1)
        won = torch.logsumexp(weight.log() + F.logsigmoid(right - wrong), 1)
        return (self.penalty * (weight * wrong.square()).sum(1) - won).sum()


def trainer(folder, **recipe):
    return Trainer(
        head=BprMax(),
        recipe={
            "run": {"out": f"{folder}/run", "steps": 40, "eval_every": 20, "log_every": 10},
            "synthetic": {"users": 400, "items": 100},
            "data": {"max_length": 40, "global_batch": 32},
            "model": {"dim": 16, "layers": 1},
            "head.num_negatives": 32,
            **recipe,
        },
    )


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    training = trainer(folder)
    training.fit()
    model = load_export(training.export(f"{folder}/export"), head=BprMax())
    history, times = [31, 7, 12], [1_600_000_000, 1_600_000_900, 1_600_003_600]  # HSTU looks at times
    print(f"after {history}:", model.recommend(history, times=times, k=5))
