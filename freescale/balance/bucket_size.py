"""How dense gradients are cut: all buckets but the last travel while the backward goes on."""

from __future__ import annotations

# A bucket that holds the whole model would only begin to travel when the backward has ended; many small ones pay for
# their starts.
BUCKETS = 8
LEAST_BYTES, MOST_BYTES = 2 << 20, 25 << 20


def bucket_bytes(dense_bytes: float) -> int:
    """Largest bucket for so many bytes of gradients, in whole MiB."""
    wanted = -(-int(dense_bytes) // (BUCKETS << 20)) << 20
    return min(MOST_BYTES, max(LEAST_BYTES, wanted))
