"""A worker's address for probes and metrics, served by threads of their own.

So it answers whatever the event loop does: that a loop stands still is what `/livez` is there to tell.
The database plays no part in that, or a restart of it would have every worker killed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from jobq._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from jobq._worker.report import WorkerHealth

logger = logging.getLogger("jobq.http")

_MOST_REQUESTS: Final = 16  # at once; a probe that finds so many waiting is refused
_REQUEST_TIMEOUT_S: Final = 5.0  # for one read or write; http.server knows no limit for a whole request
_LONGEST_REQUEST_S: Final = 10.0  # from the first byte to the last, or whoever trickles keeps the room full
_POLL_S: Final = 0.1  # how soon a close is noticed


class WorkerHttp:
    """Serves ``/livez``, ``/readyz`` and ``/metrics`` until it is closed; a context manager, too.

    Made by :meth:`jobq.Worker.serve_http`.

    Args:
        health: returns the worker's health, from any thread.
        host: the address to listen on; ``0.0.0.0`` for all of IPv4, ``::`` for all.
        port: 0 for one that is free.
        metrics: what answers at ``/metrics``, ``None`` for nothing.

    Raises:
        ConfigError: nothing can listen there.

    Attributes:
        port: the port that it listens on.
    """

    def __init__(
        self, health: Callable[[], WorkerHealth], host: str, port: int, metrics: WSGIApplication | None
    ) -> None:
        try:
            self._server = _Server(host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"http: cannot listen on {host}:{port}: {error}") from error
        self._server.set_app(_Routes(health, metrics).answer)
        self.port: Final[int] = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="jobq-http", daemon=True
        )
        self._thread.start()
        logger.info("serving /livez, /readyz and /metrics on %s:%d", host, self.port)

    def close(self) -> None:
        """Listen no more. Requests that are being answered are not waited for."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()


class _Routes:
    """What is answered at which path."""

    def __init__(self, health: Callable[[], WorkerHealth], metrics: WSGIApplication | None) -> None:
        self._health = health
        self._metrics = metrics

    def answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics" and self._metrics is not None:
            return self._metrics(environ, start_response)
        status, lines = self._text(path)
        body = "".join(f"{line}\n" for line in lines).encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    def _text(self, path: str) -> tuple[str, tuple[str, ...]]:
        if path == "/livez":
            health = self._health()
            return ("200 OK", ("alive",)) if health.alive else ("503 Service Unavailable", health.problems)
        if path == "/readyz":
            health = self._health()
            return ("200 OK", ("ready",)) if health.ready else ("503 Service Unavailable", health.problems)
        if path == "/metrics":
            return "501 Not Implemented", ("metrics need prometheus-client: pip install 'jobq[prometheus]'",)
        return "404 Not Found", ("there are /livez, /readyz and /metrics",)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = _MOST_REQUESTS

    def __init__(self, host: str, port: int) -> None:
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._until: dict[socket.socket, float] = {}  # the requests in the room, and when each has to end
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for our name, and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._until[request] = time.monotonic() + _LONGEST_REQUEST_S
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # it is closed here: from now on its descriptor may be another's
            self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what takes too long. Called after each request and every `_POLL_S`."""
        now = time.monotonic()
        with self._lock:
            for request in [one for one, until in self._until.items() if until < now]:
                del self._until[request]
                with contextlib.suppress(OSError):  # the client was faster
                    request.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - http.server's
        # Called while the exception is handled: a client that went away, mostly.
        logger.debug("a request failed", exc_info=sys.exc_info())


class _Request(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def get_stderr(self) -> Any:
        return _Complaints()


class _Complaints:
    """Where wsgiref writes the traceback of an application that failed."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.warning("a request could not be answered; the next one is tried anew:\n%s", text)

    def flush(self) -> None:
        pass
