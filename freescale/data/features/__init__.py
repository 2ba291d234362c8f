"""Features of events, items, users and requests, as batches carry them."""
