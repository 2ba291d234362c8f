"""What every test process needs."""

import torch

# Tests fork ranks, also after they have computed themselves. On Arm, oneDNN's thread pool does not survive a fork
# (a forked rank would hang in its first float32 product), so tests do without oneDNN.
torch.backends.mkldnn.enabled = False
