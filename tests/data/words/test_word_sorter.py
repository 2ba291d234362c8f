"""Words in bounded memory: each once, by its hash, whatever the budget; two with one hash are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.words import word_sorter
from freescale.data.words.word_hash import hash_words
from freescale.data.words.word_sorter import WordSorter
from freescale.errors import DataError


def sorted_words(tmp_path: Path, chunks: list[list[str]], memory: int) -> dict[int, str]:
    sorter = WordSorter(tmp_path / "spill", memory, what="item")
    for chunk in chunks:
        column = pa.array(chunk, type=pa.string())
        sorter.add(hash_words(column), column)
    every = np.unique(hash_words(pa.array([word for chunk in chunks for word in chunk], type=pa.string())))
    sorter.write(tmp_path / "words.parquet", every)
    table = pq.read_table(tmp_path / "words.parquet")
    assert (np.diff(table["id"].to_numpy().astype(object)) > 0).all()
    return dict(zip(table["id"].to_pylist(), table["word"].to_pylist()))


@pytest.mark.parametrize("memory", [1, 20_000, 1 << 30])
def test_each_word_stands_there_once(tmp_path: Path, memory: int) -> None:
    numbers = np.random.default_rng(1).integers(0, 3000, (30, 200))
    chunks = [[f"wörd-{n}" for n in chunk] for chunk in numbers.tolist()]
    found = sorted_words(tmp_path, chunks, memory)
    words = sorted({word for chunk in chunks for word in chunk})
    assert found == dict(zip(hash_words(pa.array(words)).tolist(), words))
    assert (tmp_path / "spill").exists() == (memory < 1 << 30)


def test_the_same_words_again_and_again_are_not_spilled(tmp_path: Path) -> None:
    chunks = [[f"w{n}" for n in range(100)]] * 200
    assert len(sorted_words(tmp_path, chunks, 100_000)) == 100
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize("chunks", [[["a", "b"]], [["a"], ["b"]]], ids=["in a chunk", "apart"])
@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_two_words_with_one_hash_are_refused(tmp_path: Path, chunks: list[list[str]], memory: int) -> None:
    sorter = WordSorter(tmp_path / "spill", memory, what="item")

    def sort() -> None:
        for chunk in chunks:
            sorter.add(np.full(len(chunk), 7), pa.array(chunk))
        sorter.write(tmp_path / "words.parquet", np.array([7]))

    with pytest.raises(
        DataError, match=r"(?s)Two items have the same 64-bit hash.*'a' and 'b'.*another name"
    ):
        sort()


def test_words_of_ids_that_were_left_out_are_not_kept(tmp_path: Path) -> None:
    words = pa.array(["a", "b", "c"])
    hashes = hash_words(words)
    sorter = WordSorter(tmp_path / "spill", 1 << 20, what="user")
    sorter.add(hashes, words)
    sorter.write(tmp_path / "words.parquet", np.sort(hashes[:2]))
    assert sorted(pq.read_table(tmp_path / "words.parquet")["word"].to_pylist()) == ["a", "b"]


def test_runs_are_cut_into_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_sorter, "_RUN_BATCHES", 2)
    chunks = [[f"{n}-{m}" for n in range(50)] for m in range(20)]
    assert len(sorted_words(tmp_path, chunks, 4000)) == 1000
