"""From a batch to the rows it needs: its ids, of items and of features, and the batch with indices instead of them."""
