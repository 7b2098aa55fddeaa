"""The listener: makes a waiting worker prompt. Polling alone is correct; this only saves its delay.

While it waits for a queue it holds a shared advisory lock, and enqueuers that find nobody holding
one send nothing (see `enqueue`). It proves itself before it is believed: a notification sent
through another connection has to arrive. Where none does (a pooler in transaction mode) it says so
once and the worker polls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Final

from jobq._driver_errors import map_error
from jobq._errors import Error
from jobq._operation import Call, Operation, in_schema, quote_identifier
from jobq._statements.control import control_channel
from jobq._statements.enqueue import notify_channel

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from jobq._worker.link import Link

logger = logging.getLogger("jobq.worker")

_TEST_PREFIX: Final = "\x01"  # no queue's name has control characters
_TEST_TIME_LIMIT_S: Final = 2.0
_TRY_AGAIN_S: Final = 60.0  # after a deaf test: the set-up may have been mended
_PROBE_S: Final = 30.0  # how often an idle connection is asked whether it still lives

_ARM: Final = "select pg_advisory_lock_shared(hashtext({schema_name}), hashtext($1::text))::text"
_DISARM: Final = "select pg_advisory_unlock_shared(hashtext({schema_name}), hashtext($1::text))::text"
_SEND: Final = "select pg_notify($1::text, $2::text)::text"


class Listener:
    """Waits for notifications on a connection of its own.

    Args:
        link: its connection, direct to the server.
        other: another connection, to send the test through.
        schema: whose queues it listens for.
        on_news: called with a queue's name when something was enqueued there, and with ``None``
            when notifications may have been missed.
        on_alert: called when an operator has said something, on a channel of its own.
    """

    def __init__(
        self,
        link: Link,
        other: Link,
        schema: str,
        on_news: Callable[[str | None], None],
        on_alert: Callable[[], None],
    ) -> None:
        self._link = link
        self._other = other
        self._schema = schema
        self._channel = notify_channel(schema)
        self._control_channel = control_channel(schema)
        self._on_news = on_news
        self._on_alert = on_alert
        self._wanted: set[str] = set()
        self._armed: set[str] = set()
        self._changed = asyncio.Event()
        self._test_token: str | None = None
        self._test_passed = asyncio.Event()
        self._warned_deaf = False
        self._noted_loss = False
        self.hears = False

    def arm(self, queue: str) -> bool:
        """Ask to be notified of a queue. Returns whether notifications can be expected already."""
        if not self.hears:
            return False
        if queue not in self._wanted:
            self._wanted.add(queue)
            self._changed.set()
        return queue in self._armed

    def disarm(self, queue: str) -> None:
        """Ask for no more notifications of a queue."""
        if queue in self._wanted:
            self._wanted.discard(queue)
            self._changed.set()

    async def run(self) -> None:
        """Listen until cancelled, through every loss of the connection."""
        while True:
            try:
                pause_s = await self._listen()
            except Error as error:
                if not self._noted_loss:
                    self._noted_loss = True
                    logger.info("the listener lost its connection, polling meanwhile: %s", error)
                pause_s = self._link.retry_delay_s()
            self.hears = False
            self._armed.clear()
            await self._link.close()
            self._on_news(None)
            await asyncio.sleep(pause_s)

    async def _listen(self) -> float:
        session = await self._link.open()
        if session.pooled:
            return self._be_deaf("the connection goes through a pooler in transaction mode")
        connection = session.connection
        connection.add_notify_handler(self._hear)
        for channel in (self._channel, self._control_channel):
            await self._link.run(_statement(f"listen {quote_identifier(channel)}"))
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        fd = connection.fileno()
        test = asyncio.create_task(self._send_test())
        try:
            while True:
                loop.add_reader(fd, readable.set)
                await self._wait(readable)
                loop.remove_reader(fd)  # psycopg puts its own in its place
                self._receive(connection, readable)
                if test.done() and not self.hears and not self._judge(test):
                    return self._be_deaf("a notification that the worker sent itself did not arrive")
                await self._reconcile()
        finally:
            test.cancel()
            if not connection.closed:
                loop.remove_reader(fd)

    async def _wait(self, readable: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (readable, self._changed)]
        try:
            done, _ = await asyncio.wait(
                waits,
                timeout=_PROBE_S if self.hears else _TEST_TIME_LIMIT_S / 4,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
        if not done and self.hears:
            await self._link.run(_statement("select 1"))

    def _receive(self, connection: psycopg.AsyncConnection[object], readable: asyncio.Event) -> None:
        if not readable.is_set():
            return
        readable.clear()
        pgconn = connection.pgconn
        try:
            pgconn.consume_input()
        except Exception as error:
            raise map_error(error) from error
        while (notice := pgconn.notifies()) is not None:
            self._hear_text(notice.relname.decode(errors="replace"), notice.extra.decode(errors="replace"))

    def _hear(self, notice: psycopg.Notify) -> None:
        self._hear_text(notice.channel, notice.payload)

    def _hear_text(self, channel: str, payload: str) -> None:
        if channel == self._control_channel:
            self._on_alert()
        elif not payload.startswith(_TEST_PREFIX):
            self._on_news(payload)
        elif payload == self._test_token:
            self._test_passed.set()

    async def _send_test(self) -> None:
        self._test_passed.clear()
        self._test_token = _TEST_PREFIX + secrets.token_hex(8)
        await self._other.run(_statement(_SEND, self._channel, self._test_token))
        async with asyncio.timeout(_TEST_TIME_LIMIT_S):
            await self._test_passed.wait()

    def _judge(self, test: asyncio.Task[None]) -> bool:
        """Read the test's result; a test that could not be sent says nothing, and raises."""
        error = test.exception()
        if error is None:
            self.hears = True
            self._noted_loss = False
            self._on_news(None)
            return True
        if isinstance(error, TimeoutError):
            return False
        raise error

    def _be_deaf(self, why: str) -> float:
        if not self._warned_deaf:
            self._warned_deaf = True
            logger.warning(
                "no notifications: %s; jobs are found by polling alone. "
                "Give the client a direct listen_dsn to be prompt",
                why,
            )
        return _TRY_AGAIN_S

    async def _reconcile(self) -> None:
        """Take and release locks until what is held is what is wanted."""
        self._changed.clear()
        if not self.hears:
            return
        for queue in self._armed - self._wanted:
            await self._link.run(_statement(in_schema(_DISARM, self._schema), queue))
            self._armed.discard(queue)
        for queue in self._wanted - self._armed:
            await self._link.run(_statement(in_schema(_ARM, self._schema), queue))
            self._armed.add(queue)
            self._on_news(queue)  # what came before the lock was held sent no notification


def _statement(sql: str, *params: str) -> Operation[None]:
    yield Call(sql, params)
