"""A TCP proxy in front of the server, for bad weather on the network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from psycopg.conninfo import conninfo_to_dict

from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType
    from typing import Self

_CHUNK_BYTES: Final = 64 << 10
_CALL_TIMEOUT_S: Final = 10.0
_RESET: Final = struct.pack("ii", 1, 0)  # linger on, 0 s: close sends RST


class TcpProxy:
    """Listens on 127.0.0.1 and forwards to a database, as well or badly as it is told.

    It runs in a thread and event loop of its own, so it goes on whatever the test's loop does.
    Every method may be called from any thread and returns once it has taken effect.

    A silent proxy still has a kernel that acknowledges TCP keepalives and data up to its
    buffers: only a time limit of the client's own notices it, which is the point.

    Args:
        dsn: the database to forward to, by socket or TCP.
    """

    def __init__(self, dsn: str) -> None:
        self._target = conninfo_to_dict(dsn)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._links: set[_Link] = set()
        self._passing = {"to_server": asyncio.Event(), "from_server": asyncio.Event()}
        for event in self._passing.values():
            event.set()
        self._listener: socket.socket | None = None
        self._port: Final = free_ports()
        self.accepted = 0
        self.delay_s = 0.0
        """How long each chunk is held before it is passed on."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    @property
    def dsn(self) -> str:
        """The address of the same database through the proxy."""
        user, name = self._target.get("user", ""), self._target.get("dbname", "")
        password = f":{self._target['password']}" if self._target.get("password") else ""
        return f"postgresql://{user}{password}@127.0.0.1:{self._port}/{name}"

    @property
    def connections(self) -> int:
        """How many connections are open through it."""
        return len(self._links)

    def silence(self, *, to_server: bool = True, from_server: bool = True) -> None:
        """Pass nothing on in these directions, and say nothing of it.

        With ``to_server=False`` requests are carried out and only their replies are lost. New
        connections are accepted and hang.
        """
        self._set_passing(to_server=not to_server, from_server=not from_server)

    def resume(self) -> None:
        """Pass everything on again, what was held back first."""
        self._set_passing(to_server=True, from_server=True)

    def drop(self, *, reset: bool = True) -> None:
        """Cut all open connections, by RST or by an orderly end; new ones are accepted."""
        self._call(self._drop(reset=reset))

    def refuse(self) -> None:
        """Stop listening, so that new connections are refused; open ones stay."""
        self._call(self._stop_listening())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._call(self._listen())

    # -- in the proxy's own thread ---------------------------------------------------------------

    def _call(self, step: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(_CALL_TIMEOUT_S)

    def _set_passing(self, **directions: bool) -> None:
        async def change() -> None:
            for name, passes in directions.items():
                event = self._passing[name]
                event.set() if passes else event.clear()

        self._call(change())

    async def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept_one, listener)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # it gave up meanwhile
            return
        client.setblocking(False)
        self.accepted += 1
        link = _Link(client)
        link.task = self._loop.create_task(self._serve(link))
        # not at the end of the task: one that is cancelled before its first step has none
        link.task.add_done_callback(lambda _: self._forget(link))
        self._links.add(link)

    def _forget(self, link: _Link) -> None:
        self._links.discard(link)
        link.close()

    async def _serve(self, link: _Link) -> None:
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._passing["to_server"].wait()
            link.server = await self._connect()
            pumps += [
                self._loop.create_task(self._pump(link.client, link.server, self._passing["to_server"])),
                self._loop.create_task(self._pump(link.server, link.client, self._passing["from_server"])),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:  # the server is away: the client sees its connection end
            pass
        finally:
            # no socket is closed while a task waits for it: the selector would never forget it
            await _end(*pumps)

    async def _connect(self) -> socket.socket:
        host, port = str(self._target.get("host", "127.0.0.1")), int(self._target.get("port") or 5432)
        local = host.startswith("/")
        server = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        server.setblocking(False)
        try:
            await self._loop.sock_connect(server, f"{host}/.s.PGSQL.{port}" if local else (host, port))
        except BaseException:
            server.close()
            raise
        return server

    async def _pump(self, source: socket.socket, sink: socket.socket, passing: asyncio.Event) -> None:
        with contextlib.suppress(OSError):  # either end is gone: so is the link
            while True:
                await passing.wait()
                chunk = await self._loop.sock_recv(source, _CHUNK_BYTES)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await passing.wait()  # silenced while we waited for the chunk
                if not chunk:
                    return
                await self._loop.sock_sendall(sink, chunk)

    async def _drop(self, *, reset: bool) -> None:
        links = list(self._links)
        for link in links:
            link.reset = reset
        await _end(*(link.task for link in links if link.task is not None))

    async def _close(self) -> None:
        await self._stop_listening()
        await self._drop(reset=False)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


class _Link:
    """The two sockets of one connection, and the task that serves it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.task: asyncio.Task[None] | None = None
        self.reset = False

    def close(self) -> None:
        if self.reset:
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.client.close()
        if self.server is not None:
            self.server.close()
