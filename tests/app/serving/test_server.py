"""What the server cannot answer it refuses in words about the request."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator

import pytest

from freescale.app.serving.server import ChainServer
from freescale.exports import ChainModel, read_version
from freescale.exports.chains.chain import Publisher
from tests.exports.test_export import export, make_parts


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainServer]:
    folder = tmp_path_factory.mktemp("served")
    version = read_version(export(folder / "out", make_parts()))
    Publisher(folder / "chain").publish(version, {"step": 0})
    server = ChainServer(ChainModel(folder / "chain"))
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server.close()


def _post(server: ChainServer, path: str, body: bytes, length: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=30)
    connection.request("POST", path, body, {} if length is None else {"Content-Length": length})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, str(said.get("error", said))


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("/recommend", {"history": [3], "times": [1], "k": "a"}, "k must be a whole number"),
        ("/recommend", {"history": [3], "times": [1], "filter_seen": "no"}, "filter_seen is on or off"),
        ("/recommend", {"history": 3, "times": [1]}, "history must be a list of items"),
        ("/recommend", {"times": [1]}, "a request needs history"),
        ("/recommend", {}, "a request needs history\n  got:     nothing"),
        ("/score", {"history": [3], "times": [1]}, "a request needs candidates\n  got:     history, times"),
        ("/score", {"history": [3], "candidates": None}, "candidates must be a list of items"),
        ("/recommend", {"history": [3], "times": [float("nan")]}, "times must be numbers\n  got:     nan"),
    ],
)
def test_what_a_request_cannot_mean_is_refused_by_name(
    server: ChainServer, path: str, asked: dict[str, object], said: str
) -> None:
    code, error = _post(server, path, json.dumps(asked).encode())
    assert code == 400
    assert error.startswith(said)


@pytest.mark.parametrize("body", [b"history=3", b"[3]", b"7", b"\xff\xfe{", b"{" * 9, b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_told_what_one_is(server: ChainServer, body: bytes) -> None:
    code, error = _post(server, "/recommend", body)
    assert code == 400
    assert error.startswith("a request is a JSON object\n  got:  ")
    assert '{"history": [31, 7], "k": 10}' in error
    assert len(error) < 300


def test_a_length_that_is_none_is_refused(server: ChainServer) -> None:
    assert _post(server, "/recommend", b"{}", length="two") == (413, "a request has 1 to 1048576 bytes")


def test_after_all_that_it_answers(server: ChainServer) -> None:
    code, answer = _post(server, "/recommend", b'{"history": [3, 14], "times": [1, 2], "k": 2}')
    assert code == 200
    assert "items" in answer
