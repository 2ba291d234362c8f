"""A data set in an S3 bucket of a local server: the same histories, copied once, also by forked loader processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freescale.data.preparing.preparation import prepare
from freescale.data.source_kinds import open_source
from freescale.data.sources.parquet import ParquetSource
from freescale.data.stored import storage
from tests.data.preparing.test_grouped_index import NAMES, by_user, write_folder
from tests.prepared_data import made_up, write_dataset

pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    threaded = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"{host}:{port}"
    threaded.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(name below the bucket, local folder) -> address, after everything in the folder has been uploaded."""
    from pyarrow.fs import FileSystem

    monkeypatch.setenv(storage.CACHE_VARIABLE, str(tmp_path / "cache"))
    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    options = f"?endpoint_override={server}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    system, root = FileSystem.from_uri(f"s3://data{options}")
    system.create_dir(root)

    def upload(name: str, source: Path) -> str:
        files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
        for file in files:
            key = name if file == source else f"{name}/{file.relative_to(source)}"
            with system.open_output_stream(f"{root}/{key}") as stream:
                stream.write(file.read_bytes())
        return f"s3://data/{name}{options}"

    return upload


def test_a_prepared_data_set(tmp_path: Path, bucket: Any) -> None:
    data = write_dataset(tmp_path / "data", made_up(200))
    source = open_source(bucket("prepared", data))
    assert isinstance(source, ParquetSource)
    assert by_user(source) == by_user(ParquetSource(data))


def _read(source: ParquetSource, answers: Any) -> None:
    answers.put(by_user(source))


def test_a_forked_loader_process(tmp_path: Path, bucket: Any) -> None:
    data = write_dataset(tmp_path / "data", made_up(20))
    source = ParquetSource(bucket("forked", data))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_read, args=(source, answers))
    process.start()
    assert answers.get(timeout=100) == by_user(ParquetSource(data))
    process.join(timeout=20)


def test_raw_and_grouped_input(tmp_path: Path, bucket: Any) -> None:
    (tmp_path / "x.csv").write_text(
        "user,item\n" + "".join(f"{u},w{n}\n" for u in range(3) for n in range(4))
    )
    assert prepare(bucket("raw/x.csv", tmp_path / "x.csv"), tmp_path / "csv").num_events == 12
    raw = write_folder(tmp_path / "raw")
    address = bucket("grouped", raw)
    assert "histories stay in s3://data/grouped" in " ".join(
        prepare(address, tmp_path / "index", columns=NAMES).taken
    )
    prepare(raw, tmp_path / "here", columns=NAMES)
    assert by_user(ParquetSource(tmp_path / "index")) == by_user(ParquetSource(tmp_path / "here"))
    assert "shard-00000.parquet" not in os.listdir(tmp_path / "index")
