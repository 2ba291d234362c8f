"""Tables cut over the ranks: who owns which rows, what a batch asks of whom, and `ShardedEmbedding` over all of it."""
