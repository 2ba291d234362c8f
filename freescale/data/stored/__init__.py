"""A data set on disk: manifest, shards, digests, texts and content of items."""
