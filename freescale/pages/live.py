"""The page of a run that is still going, kept up to date: served to this machine alone, to whoever has the address.

The server listens on 127.0.0.1. A secret word in the address keeps other users of the machine out, and a request
must name this machine as its host: a web site that points a name of its own here is refused. Nothing is written;
the run does not notice.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from freescale.errors import ConfigError
from freescale.pages.drawing.page import LIVE_POLICY
from freescale.pages.report import config_text, render_report, require_run
from freescale.trace import PUBLISHED_FILE, RunSpans, read_metrics, read_published, read_spans

NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""How this machine calls itself; any port, so that a tunnel may come in through another."""

LEAST_PAUSE_S = 1.0
SHARE = 0.1
"""The page is made anew at most so often that this share of one core is spent on it: cores belong to the run."""

QUIET_MIN = 5
"""A run that has written nothing for so many minutes is said to be quiet."""

_HEADERS = {
    "Content-Security-Policy": f"{LIVE_POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveRun:
    """The page of a run as it is now, made anew when its files have changed."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(run_dir)
        require_run(self._folder)
        self._lock = threading.Lock()
        self._version = ""
        self._html = ""
        self._not_before = 0.0
        self._spans = RunSpans()
        self._spans_state = ""

    def page(self) -> tuple[str, str]:
        """(version, HTML)."""
        with self._lock:
            if not self._html or time.monotonic() >= self._not_before:
                # Time of a core, not of the clock: beside a busy run the same work takes many times as long.
                began = time.thread_time()
                version = self._state()
                if version != self._version or not self._html:
                    self._html = self._render(version)
                    self._version = version
                took = time.thread_time() - began
                self._not_before = time.monotonic() + max(LEAST_PAUSE_S, took / SHARE)
            return self._version, self._html

    def _state(self) -> str:
        """What changes when the run writes."""
        files = [self._folder / name for name in ("metrics.jsonl", "config.yaml", PUBLISHED_FILE)]
        return _state_of(files) + _state_of(self._span_files()) + self._going()

    def _going(self) -> str:
        """How long ago the run has written: one that was killed leaves no word, and one that waits writes none."""
        try:
            minutes = (time.time() - (self._folder / "metrics.jsonl").stat().st_mtime) / 60
        except OSError:
            return "live"
        # Twice as long each time, so that the page of a run that is over is not made anew every minute.
        told = [QUIET_MIN << n for n in range(16) if QUIET_MIN << n <= minutes]
        return f"live, nothing new for {told[-1]} min" if told else "live"

    def _span_files(self) -> list[Path]:
        # The first rank's file tells; a thousand others are read only when it has grown.
        return sorted((self._folder / "spans").glob("rank-*.jsonl"))[:1]

    def _render(self, version: str) -> str:
        log = read_metrics(self._folder / "metrics.jsonl", growing=True)
        state = _state_of(self._span_files())
        if state != self._spans_state:
            # Half of the work, and rarely new: after its first steps a run keeps the spans of few.
            self._spans, self._spans_state = read_spans(self._folder), state
        return render_report(
            self._folder.resolve().name,
            log,
            spans=self._spans,
            config=config_text(self._folder),
            published=read_published(self._folder),
            live=version,
            going=self._going(),
        )


class LivePage:
    """A server of one page on 127.0.0.1; `address` opens it, `serve` runs until `close` or Ctrl-C."""

    def __init__(self, run_dir: str | os.PathLike[str], *, port: int = 0) -> None:
        self._run = LiveRun(run_dir)
        self._token = secrets.token_urlsafe(18)
        run, token = self._run, self._token

        class Handler(_Handler):
            live_run = run
            live_token = token

        try:
            self._server = _Server(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(
                "the live page cannot listen on this port",
                got=f"--port {port}: {error.strerror}",
                next_step="leave --port out: a free one is taken",
            ) from None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """What to open; whoever has it sees the page."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Answer until `close` is called from another thread or a signal raises here."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop and let go of the port."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Two live pages on one port would take each other's requests.
    allow_reuse_port = False


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page; everything else is refused without saying what there is."""

    live_run: LiveRun
    live_token: str
    timeout = 10  # a connection that says nothing does not stay
    server_version = "freescale"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, or 204 where `after` names the version that is current."""
        if not _is_this_machine(self.headers.get("Host", "")):
            self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, "This page answers to 127.0.0.1 and localhost only.\n"
            )
            return
        asked = urlsplit(self.path)
        _, token, *rest = asked.path.split("/")
        if not hmac.compare_digest(token.encode(), self.live_token.encode()) or rest != [""]:
            self._answer(HTTPStatus.NOT_FOUND, "There is nothing here. Open the address that was printed.\n")
            return
        version, html = self.live_run.page()
        if parse_qs(asked.query).get("after") == [version]:
            self._answer(HTTPStatus.NO_CONTENT, "")
        else:
            self._answer(HTTPStatus.OK, html, kind="text/html")

    do_HEAD = do_GET  # noqa: N815 (the name http.server looks for)

    def _answer(self, status: HTTPStatus, text: str, *, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the address with its secret does not belong in a log."""


def _state_of(files: list[Path]) -> str:
    """What changes when one of the files does; one that is not there, or is being replaced, has no state."""
    sizes = []
    for path in files:
        try:
            known = path.stat()
        except OSError:
            continue
        sizes.append(f"{known.st_size:x}.{known.st_mtime_ns:x}")
    return f"[{'-'.join(sizes)}]"


def _is_this_machine(host: str) -> bool:
    """Whether a Host header names this machine by one of its own names."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    return name.lower() in NAMES and (not port or port.isdigit())
