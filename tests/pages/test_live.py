"""The live page: follows a run that writes, for this machine alone, for whoever has the address."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freescale.errors import ConfigError, FreeScaleError
from freescale.pages import live
from freescale.pages.live import LivePage, LiveRun
from tests.pages.test_report import Page, run_events, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo", run_events(60)[:30])


@pytest.fixture
def served(folder: Path) -> Iterator[LivePage]:
    with LivePage(folder) as page:
        thread = threading.Thread(target=page.serve)
        thread.start()
        try:
            yield page
        finally:
            page.close()
            thread.join(10)


def ask(
    page: LivePage, path: str | None = None, *, host: str | None = None, method: str = "GET"
) -> http.client.HTTPResponse:
    """An answer, its body read into `text`."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.putrequest(method, path or page.address.partition(str(page.port))[2], skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{page.port}")
    connection.endheaders()
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_the_page_is_shown_to_whoever_has_the_address(served: LivePage) -> None:
    answer = ask(served)
    assert answer.status == 200
    page = Page(answer.text)  # type: ignore[attr-defined]
    assert "demo live" in page.text
    assert "Final loss" in page.text
    assert "no end event" not in page.text, "a run that goes on has none yet"
    assert "connect-src 'self'" in str(answer.headers["Content-Security-Policy"])
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_a_run_that_writes_no_more_is_not_called_live_without_a_word(served: LivePage, monkeypatch) -> None:
    folder = served._run._folder
    for age_min, said in (
        (4, "demo live"),
        (11, "nothing new for 10 min"),
        (3000, "nothing new for 2560 min"),
    ):
        last = time.time() - 60 * age_min
        os.utime(folder / "metrics.jsonl", (last, last))
        monkeypatch.setattr(served._run, "_not_before", 0.0)
        text = Page(ask(served).text).text  # type: ignore[attr-defined]
        assert said in text
        assert ("nothing new" in text) == (age_min > 5)


def test_it_listens_on_this_machine_only(served: LivePage) -> None:
    assert served._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", ["/", "/x/", "/{token}", "/{token}x/", "/{token}/config.yaml", "/{token}/../"]
)
def test_other_addresses_show_nothing(served: LivePage, path: str) -> None:
    answer = ask(served, path.format(token=served.address.split("/")[-2]))
    assert answer.status == 404
    assert "Final loss" not in answer.text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@x"]
)
def test_other_names_are_refused(served: LivePage, host: str) -> None:
    answer = ask(served, host=host)
    assert answer.status == 421
    assert "Final loss" not in answer.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9999", "127.0.0.1:1234", "[::1]:80", "[::1]"])
def test_own_names_are_answered_whatever_the_port(served: LivePage, host: str) -> None:
    """A tunnel may come in through another port."""
    assert ask(served, host=host).status == 200


def test_nothing_can_be_sent(served: LivePage) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert ask(served, method=method).status == 501
    head = ask(served, method="HEAD")
    assert head.status == 200
    assert head.text == ""  # type: ignore[attr-defined]


def test_it_follows_a_run_that_writes(
    served: LivePage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    first = ask(served).text  # type: ignore[attr-defined]
    version = first.partition('data-version="')[2].partition('"')[0]
    path = served.address.partition(str(served.port))[2] + f"?after={version}"
    assert ask(served, path).status == 204
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"event": "step", "step": 57, "loss": 1.2345}) + '\n{"event": "step", "st')
    answer = ask(served, path)
    assert answer.status == 200
    assert "Final loss 1.2345" in Page(answer.text).text  # type: ignore[attr-defined]
    assert "is cut" not in answer.text, "half a line is being written"  # type: ignore[attr-defined]
    (folder / "metrics.jsonl").unlink()  # as a run that resumes replaces it
    assert "metrics.jsonl is missing" in ask(served, path).text  # type: ignore[attr-defined]


def test_a_page_that_takes_long_is_made_less_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    clock = [0.0]

    def slow(*_: object, **__: object) -> str:
        made.append(clock[0])
        clock[0] += 3.0
        return "page"

    monkeypatch.setattr(live, "render_report", slow)
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(live.time, name, lambda: clock[0])
    run = LiveRun(folder)
    for _ in range(100):
        run.page()
        clock[0] += 1.0
        with (folder / "metrics.jsonl").open("a") as log:
            log.write("{}\n")
    assert len(made) * 3.0 <= 0.15 * clock[0], "a tenth of a core at most, and the first page"


def test_a_folder_without_a_run_and_a_taken_port_are_refused(served: LivePage, folder: Path) -> None:
    with pytest.raises(FreeScaleError, match="no such run"):
        LivePage(folder / "nowhere")
    with pytest.raises(ConfigError, match="cannot listen") as caught:
        LivePage(folder, port=served.port)
    assert "--port" in str(caught.value.next_step)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(folder: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "freescale", "report", str(folder), "--live"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Whoever runs tests in the background of a shell has them ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert len(address.split("/")[3]) >= 20
        port = int(address.split(":")[2].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/" + address.split("/", 3)[3])
        assert connection.getresponse().status == 200
        assert "Ctrl-C ends it" in started.stdout.readline()
        started.send_signal(signal.SIGINT)
        out, errors = started.communicate(timeout=20)
    finally:
        started.kill()
    assert started.returncode == 0, errors
    assert "The live page has ended. The run goes on." in out
    assert address.split("/")[3] not in errors
    assert not (folder / "report.html").exists(), "nothing is written"


def test_the_state_names_the_end(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"event": "end", "seconds": 1.0, "time": time.time()}) + "\n")
    assert "demo finished" in Page(LiveRun(folder).page()[1]).text
