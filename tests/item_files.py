"""Made-up texts and content vectors for the items of embedded data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ("red", "green", "blue", "small", "large", "old", "new", "round", "sharp", "quiet", "loud", "odd")


def write_made_up_texts(path: Path, num_items: int, *, seed: int = 1) -> Path:
    """One to six words for every item 0 .. num_items, some of them empty."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, size=n % 7)) for n in range(num_items + 1)]
    pq.write_table(pa.table({"item": np.arange(num_items + 1), "text": texts}), path)
    return path


def write_made_up_content(path: Path, num_items: int, *, width: int = 5) -> Path:
    """A vector for each of num_items items."""
    np.save(path, np.random.default_rng(2).normal(size=(num_items, width)).astype(np.float32))
    return path
