"""One training step on one rank: forward and backward, dense gradients over the ranks, all of it recorded or not."""
