"""A dedicated connection that comes back: opened when needed, dropped when in doubt."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jobq._errors import DatabaseUnavailable
from jobq._postgres import break_connection, reconnect_delay
from jobq._sessions import AsyncSession

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from jobq._operation import Operation

T = TypeVar("T")
_LAST_ANSWER_S: Final = 0.7  # for a statement that is under way when nobody wants it any more
_BREAK_S: Final = 0.2  # for a broken connection to be noticed by what waits for it
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing


class Link:
    """One part's own connection to the database.

    A statement whose reply was lost may or may not have happened: `run` drops the connection and
    raises, and each part knows what that means for it. `generation` counts connections, so that
    what was learnt through one (marks) is not believed through another.

    Args:
        conninfo: where the database is.
        schema: where the queue lives.
        name: the session's ``application_name``.
        time_limit_s: seconds after which a silent server is given up. Nothing else notices a network
            that falls silent while something in it still acknowledges TCP's own probes.
    """

    def __init__(self, conninfo: str, schema: str, name: str, time_limit_s: float) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._name = name
        self._time_limit_s = time_limit_s
        self._session: AsyncSession | None = None
        self._opening = asyncio.Lock()
        self._failures = 0
        self._is_over = False
        self.generation = 0

    @property
    def pooled(self) -> bool:
        """Whether a pooler stands between, so that no session state can be kept."""
        return self._session is not None and self._session.pooled

    async def open(self) -> AsyncSession:
        """Return the open connection, made now if there is none.

        Raises:
            DatabaseUnavailable: the server cannot be reached.
        """
        async with self._opening:  # parts that share a link must not make two connections
            if self._session is None or self._session.closed:
                self._session = await self._to_its_end(self._connect())
                self.generation += 1
            return self._session

    async def run(self, operation: Operation[T]) -> T:
        """Run one operation.

        Raises:
            DatabaseUnavailable: it may or may not have taken effect.
            DatabaseError: the server refused it.
        """
        session = await self.open()
        try:
            result = await self._to_its_end(session.run(operation))
        except DatabaseUnavailable:
            self._failures += 1
            if self._session is session:  # another part may have opened the next one already
                self._session = None
            await session.close()
            raise
        self._failures = 0
        return result

    async def _connect(self) -> AsyncSession:
        try:
            return await AsyncSession.open(
                self._conninfo,
                schema=self._schema,
                name=self._name,
                plan_settings=True,
                time_limit_s=self._time_limit_s,
            )
        except DatabaseUnavailable:
            self._failures += 1
            raise

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that is not torn in the middle when its task is cancelled.

        A statement that is under way gets a moment to answer, so that the connection stays whole and
        what it did is not left in doubt; one that does not is given up with its connection.
        """
        task = asyncio.create_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=0 if self._is_over else _LAST_ANSWER_S)
            if not task.done():
                # Not by cancelling it first: psycopg would ask the silent server to cancel its statement.
                self._break()
                await asyncio.wait([task], timeout=_BREAK_S)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                result: object = task.result()
                if isinstance(result, AsyncSession):
                    await result.close()
            raise

    def give_up(self) -> None:
        """Wait for no more answers: whoever does learns at once that none will come. For the very end."""
        self._is_over = True
        self._break()

    def _break(self) -> None:
        if self._session is not None and not self._session.closed:
            break_connection(self._session.connection)

    def retry_delay_s(self, failures: int = 1) -> float:
        """Return how long to wait before the next try: jittered, growing with failures in a row.

        Args:
            failures: the caller's own, of which the link may not know: what the server refuses is no
                failure of the connection.
        """
        return reconnect_delay(max(self._failures, failures), _RNG)

    async def close(self) -> None:
        """Drop the connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
