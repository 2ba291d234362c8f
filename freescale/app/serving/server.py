"""A small server that follows a chain: enough to see fresh models answer, with the standard library alone.

    POST /recommend   {"history": [31, 7], "times": [...], "k": 10}     -> {"seq": 4, "items": [[88, 0.71], ...]}
    POST /score       {"history": [31, 7], "candidates": [5, 9]}        -> {"seq": 4, "scores": [...]}
    GET  /health      version, requests, failures, p50 and p99 in milliseconds

A request is answered by one version, the one that was there when it began. A delta that cannot be taken over is told,
and the version before goes on answering.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from freescale.errors import ConfigError, FreeScaleError, in_one_line
from freescale.exports import ChainModel

LOCAL = ("127.0.0.1", "localhost", "::1")
_MOST_BYTES = 1 << 20
_MOST_SHOWN = 60
_KEPT_TIMES = 100_000
_RECOMMEND = ("history", "times", "request_time", "k", "filter_seen", "exclude", "features")
_SCORE = ("history", "candidates", "times", "request_time", "features", "candidate_features")


class ChainServer:
    """Answers requests by the last version of a chain.

    Args:
        model: follows the chain.
        host: where to listen; anything but this machine needs a token.
        port: the same; 0 takes a free one.
        token: what requests must bring as `Authorization: Bearer TOKEN`; None: nothing.
        refresh_s: seconds between looks at the chain.
        tell: where lines go.
    """

    def __init__(
        self,
        model: ChainModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        refresh_s: float = 1.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if host not in LOCAL and not token:
            raise ConfigError(
                "a server that other machines reach needs a token",
                got=f"--host {host}",
                next_step="set FREESCALE_TOKEN, or leave --host out to listen on this machine alone",
            )
        self.model, self._token, self._refresh_s, self._tell = model, token, refresh_s, tell
        self.num_requests = self.num_failures = self.num_refreshes = 0
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._http = ThreadingHTTPServer((host, port), _handler(self))
        self._http.daemon_threads = True
        self.address = f"http://{host}:{self._http.server_address[1]}"
        self._threads = [threading.Thread(target=self._follow, daemon=True)]

    def serve(self) -> None:
        """Answer until `close`."""
        for thread in self._threads:
            thread.start()
        self._http.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Answer no more."""
        self._end.set()
        self._http.shutdown()
        self._http.server_close()

    def allows(self, given: str | None) -> bool:
        """Whether a request may be answered."""
        wanted = f"Bearer {self._token}"
        return self._token is None or hmac.compare_digest((given or "").encode(), wanted.encode())

    def answer(self, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a request is answered with, by one version."""
        served, started = self.model.served, time.perf_counter()
        try:
            if path == "/recommend":
                found = served.model.recommend(**_options(asked, _RECOMMEND, needed=("history",)))
                answer: dict[str, Any] = {"items": found}
            else:
                options = _options(asked, _SCORE, needed=("history", "candidates"))
                answer = {"scores": served.model.score(**options)}
        except BaseException:
            with self._lock:
                self.num_requests, self.num_failures = self.num_requests + 1, self.num_failures + 1
            raise
        with self._lock:
            self.num_requests += 1
            self._times.append(time.perf_counter() - started)
        return {"seq": served.current.seq, **answer}

    def health(self) -> dict[str, Any]:
        """How it is doing."""
        with self._lock:
            times = np.array(self._times)
            counts = {"requests": self.num_requests, "failures": self.num_failures}
        p50, p99 = (np.percentile(times, [50, 99]) * 1000).tolist() if len(times) else (None, None)
        current = self.model.served.current
        return {
            "seq": current.seq,
            "fingerprint": current.fingerprint,
            **current.facts,
            **counts,
            "refreshes": self.num_refreshes,
            "p50_ms": p50,
            "p99_ms": p99,
        }

    def _follow(self) -> None:
        told: str | None = None
        while not self._end.wait(self._refresh_s):
            try:
                if self.model.refresh():
                    self.num_refreshes += 1
                    current = self.model.served.current
                    self._tell(f"version {current.seq}, step {current.facts.get('step')}")
                told = None
            except Exception as error:  # of whatever kind: the next look may go well
                text = str(error) if isinstance(error, FreeScaleError) else in_one_line(error)
                if text != told:  # once, not every second
                    self._tell(f"the version before goes on answering: {text}")
                told = text


def read_request(body: bytes) -> dict[str, Any]:
    """What a request says.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError(
            "a request is a JSON object",
            got=body[:_MOST_SHOWN].decode(errors="replace"),
            allowed='such as {"history": [31, 7], "k": 10}',
        )
    return asked


def _options(asked: Mapping[str, Any], names: tuple[str, ...], *, needed: tuple[str, ...]) -> dict[str, Any]:
    other = sorted(set(asked) - set(names))
    if other:
        raise ConfigError("a request has a name that nobody knows", got=other[0], allowed=", ".join(names))
    missing = [name for name in needed if name not in asked]
    if missing:
        raise ConfigError(
            f"a request needs {missing[0]}", got=", ".join(asked) or "nothing", allowed=", ".join(names)
        )
    return dict(asked)


def _handler(server: ChainServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not server.allows(self.headers.get("Authorization")):
                self._send(401, {"error": "Authorization: Bearer TOKEN is missing or wrong"})
            elif self.path != "/health":
                self._send(404, {"error": "there are GET /health, POST /recommend and POST /score"})
            else:
                self._send(200, server.health())

        def do_POST(self) -> None:
            said = self.headers.get("Content-Length") or ""
            size = int(said) if said.isdecimal() and len(said) < 20 else 0
            if not 0 < size <= _MOST_BYTES:
                self.close_connection = True
                self._send(413, {"error": f"a request has 1 to {_MOST_BYTES} bytes"})
                return
            body = self.rfile.read(size)
            if not server.allows(self.headers.get("Authorization")):
                self._send(401, {"error": "Authorization: Bearer TOKEN is missing or wrong"})
                return
            if self.path not in ("/recommend", "/score"):
                self._send(404, {"error": "there are GET /health, POST /recommend and POST /score"})
                return
            try:
                self._send(200, server.answer(self.path, read_request(body)))
            except (FreeScaleError, ValueError, TypeError) as error:
                self._send(400, {"error": str(error)})

        def _send(self, code: int, said: Mapping[str, Any]) -> None:
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: /health counts."""

    return Handler
