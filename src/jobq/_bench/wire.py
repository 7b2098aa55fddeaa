"""Counts statements and round trips on the wire: a small proxy that reads PostgreSQL's protocol.

A statement is a simple query or an execution; a round trip is an answer that ends with "ready for
query". What a library prepares once is a round trip of its own, once. Encryption is not understood:
clients have to come with ``sslmode=disable gssencmode=disable``, which `address` says.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK: Final = 65_536
_END_TIMEOUT_S: Final = 5.0  # clients come to an end before their proxy does
_QUERY, _EXECUTE, _PARSE, _READY = b"Q"[0], b"E"[0], b"P"[0], b"Z"[0]
_HEAD: Final = 5  # a message's type and its length


@dataclass(slots=True)
class Counts:
    """What went over the wire: simple queries and executions; answers; statements prepared."""

    statements: int = 0
    round_trips: int = 0
    prepared: int = 0

    def since(self, before: Counts) -> Counts:
        """Return the difference."""
        return Counts(
            self.statements - before.statements,
            self.round_trips - before.round_trips,
            self.prepared - before.prepared,
        )


class Wire:
    """A proxy before a server on a Unix socket or a TCP port. A context manager.

    Args:
        dsn: the server's address.
    """

    def __init__(self, dsn: str) -> None:
        self._server = conninfo_to_dict(dsn)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._counts = Counts()
        port = self._listener.getsockname()[1]
        self.address: Final = make_conninfo(
            dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable"
        )
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(_END_TIMEOUT_S)
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)

    def read(self) -> Counts:
        """Return the counts so far."""
        with self._lock:
            return self._counts.since(Counts())

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(client, self._connect()), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        """Pass on what either side says, until one of them ends."""
        back = threading.Thread(target=_pump, args=(server, client, self._answered, False), daemon=True)
        back.start()
        _pump(client, server, self._asked, True)  # noqa: FBT003 - what a thread's target takes
        back.join()
        client.close()
        server.close()

    def _connect(self) -> socket.socket:
        host, port = str(self._server.get("host", "")), int(self._server.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host or "127.0.0.1", port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _asked(self, kind: int) -> None:
        with self._lock:
            self._counts.statements += kind in {_QUERY, _EXECUTE}
            self._counts.prepared += kind == _PARSE

    def _answered(self, kind: int) -> None:
        with self._lock:
            self._counts.round_trips += kind == _READY


def _pump(
    source: socket.socket,
    target: socket.socket,
    note: Callable[[int], None],
    startup: bool,  # noqa: FBT001 - a thread's target
) -> None:
    """Pass bytes on, noting each message's type; the first of a client has a length and no type."""
    pending = b"\0" if startup else b""
    with contextlib.suppress(OSError):  # either side has gone: so does the other
        while chunk := source.recv(_CHUNK):
            pending += chunk
            while len(pending) >= _HEAD:
                end = 1 + int.from_bytes(pending[1:_HEAD], "big")
                if len(pending) < end:
                    break
                note(pending[0])
                pending = pending[end:]
            target.sendall(chunk)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
