"""What a data set holds is known by digests: other histories are told apart, and exchanged files found when read."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from freescale.data import DataDigest, ParquetSource, SyntheticSource, differences, digest_data
from freescale.data.stored import digest as digest_module
from freescale.data.stored.item_content import ContentFile
from freescale.errors import DataError
from tests.list_source import ListSource
from tests.prepared_data import CHANGES, forget_digests, made_up, write_dataset

WHERE = ("then", "now")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("digests", [True, False], ids=["written", "sampled"])
def test_other_histories_are_told_apart(tmp_path: Path, change: str, digests: bool) -> None:
    changed, told = CHANGES[change]
    folders = [write_dataset(tmp_path / "a", made_up()), write_dataset(tmp_path / "b", changed(made_up()))]
    if not digests:
        folders = [forget_digests(folder) for folder in folders]
    one, other = (digest_data(ParquetSource(folder)) for folder in folders)
    assert one.fingerprint != other.fingerprint
    assert re.search(told, "; ".join(differences(one, other, where=WHERE)))


def test_a_copy_has_the_same_digest_whatever_it_is_called(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "a", made_up())
    again = write_dataset(tmp_path / "b", made_up())
    shutil.copytree(folder, tmp_path / "copy")
    digests = [digest_data(ParquetSource(path)) for path in (folder, again, tmp_path / "copy")]
    assert len({digest.fingerprint for digest in digests}) == 1
    assert len(digests[0].parts) > 2
    assert differences(digests[0], digests[1], where=WHERE) == []
    assert DataDigest.from_state(digests[0].state()) == digests[0]


def test_a_data_set_prepared_before_there_were_digests_is_compared_by_what_both_know(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "a", made_up())
    now = digest_data(ParquetSource(folder))
    before = digest_data(ParquetSource(forget_digests(folder)))
    assert before.fingerprint != now.fingerprint
    assert differences(before, now, where=WHERE) == []


def test_a_source_from_outside_gets_a_digest_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = made_up()
    for change in ("order", "items", "lengths", "catalogue", "fewer"):
        one, other = (
            digest_data(ListSource(histories)),
            digest_data(ListSource(CHANGES[change][0](histories))),
        )
        assert one.fingerprint != other.fingerprint, change
    monkeypatch.setattr(digest_module, "_READ_WHOLE", 10)
    monkeypatch.setattr(digest_module, "_READ_HISTORIES", 7)
    first, *between, last = digest_data(ListSource(histories)).parts
    assert (first, last, len(between)) == ("histories 0 to 0", "histories 59 to 59", 5)


def test_made_up_data_differ_by_seed() -> None:
    digests = {digest_data(SyntheticSource(num_users=50, seed=seed)).fingerprint for seed in (1, 1, 2)}
    assert len(digests) == 2


def test_content_of_items_is_part_of_the_data() -> None:
    source = ListSource(made_up())
    one, other = (digest_data(source, content=content) for content in ("sampled:1", "sampled:2"))
    assert differences(one, other, where=WHERE) == ["the content vectors or texts of the items"]


def test_a_shard_of_another_data_set_is_refused_on_opening(tmp_path: Path) -> None:
    """Same users, same lengths, same number of bytes: only its digest tells."""
    folder = write_dataset(tmp_path / "a", made_up())
    other = write_dataset(tmp_path / "b", [[51 - item for item in history] for history in made_up()])
    name = next(
        path.name
        for path in sorted(folder.glob("shard-*"))
        if path.stat().st_size == (other / path.name).stat().st_size
    )
    shutil.copy(other / name, folder / name)
    with pytest.raises(DataError, match=rf"(?s){name}.*other histories than dataset\.json says"):
        ParquetSource(folder)


def test_a_catalogue_of_another_data_set_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "a", made_up())
    other = write_dataset(tmp_path / "b", CHANGES["catalogue"][0](made_up()))
    shutil.copy(other / "items.parquet", folder / "items.parquet")
    with pytest.raises(DataError, match=r"(?s)items\.parquet.*not the catalogue"):
        _ = ParquetSource(folder).items


@pytest.mark.parametrize("digests", [True, False], ids=["written", "sampled"])
def test_a_shard_exchanged_in_the_middle_of_a_run_is_found_when_it_is_read(
    tmp_path: Path, digests: bool
) -> None:
    folder = write_dataset(tmp_path / "a", made_up())
    other = write_dataset(tmp_path / "b", CHANGES["items"][0](made_up()))
    if not digests:
        forget_digests(folder)
    source = ParquetSource(folder, cache_mb=0)
    digest_data(source)
    source.read([0])
    os.utime(folder / "shard-00000.parquet")
    source.read([0])  # only touched
    shutil.copy(other / "shard-00000.parquet", folder / "shard-00000.parquet")
    with pytest.raises(
        DataError, match=r"shard-00000\.parquet has changed since this run opened it"
    ) as raised:
        source.read([0])
    assert "resumes from the last checkpoint" in str(raised.value)
    last = sorted(folder.glob("shard-*"))[-1]
    last.unlink()
    with pytest.raises(DataError, match=last.name):
        source.read([59])


def test_content_vectors_exchanged_in_the_middle_of_a_run_are_found_when_they_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.npy"
    np.save(path, np.ones((4, 3), np.float32))
    file = ContentFile(path, num_items=4)
    before = file.digest
    os.utime(path)
    file.read(np.arange(4))
    np.save(path, np.zeros((4, 3), np.float32))
    with pytest.raises(DataError, match="content vectors have changed"):
        file.read(np.arange(4))
    assert ContentFile(path, num_items=4).digest != before


def test_of_a_large_file_blocks_from_all_over_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # takes no room
    empty = digest_module.sample_file(path, num_blocks=16)
    for place in (0, (1 << 30) - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert digest_module.sample_file(path, num_blocks=16) != empty
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert digest_module.sample_file(path, num_blocks=16) == empty


def test_the_order_of_parts_counts():
    one = digest_data(prepared_like("a", "b"))
    other = digest_data(prepared_like("b", "a"))
    assert differences(one, other, where=WHERE) == [
        f"the order of its parts: a first {WHERE[0]}, b {WHERE[1]}"
    ]
    assert one.fingerprint != other.fingerprint


def prepared_like(*parts: str) -> ListSource:
    """A source whose parts look alike from outside."""
    source = ListSource([[1, 2], [1, 2]])
    source.digests = lambda: {part: f"written:{part}" for part in parts}
    return source
