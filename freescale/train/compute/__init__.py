"""One training step on one rank: forward and backward, dense gradients over the ranks, and all of it recorded and replayed."""
