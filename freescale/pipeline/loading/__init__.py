"""Batches made ready before anybody asks: read by processes or a thread, with layouts; streams balanced on the way."""
