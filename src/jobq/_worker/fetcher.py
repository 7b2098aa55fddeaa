"""The fetcher: claims jobs for the lines that have room, on one connection, one claim at a time.

A claim whose reply is lost leaves rows in `running` that nobody here knows of. The worker then
takes a new identity; the duties hand back what stands under the old one and is not known. The same
happens when another server took over, which may lack the last claims and outcomes, or this one was restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseUnavailable, Error
from jobq._statements.claim import claim, refresh
from jobq._worker.decide import UNKNOWN_KIND_DELAY_S, Parking, hand_back, refuse
from jobq._worker.execution import Execution
from jobq._worker.observers import Observers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.jobs import Jobs
    from jobq._statements.claim import Claimed
    from jobq._worker.completer import Completer
    from jobq._worker.executor import Executor
    from jobq._worker.lease import Identity, Lease
    from jobq._worker.lines import Line
    from jobq._worker.link import Link
    from jobq._worker.listener import Listener
    from jobq._worker.stats import Counters

logger = logging.getLogger("jobq.worker")

_REFRESH_S: Final = 0.02  # marks move at most this often
_RESCAN_S: Final = 60.0  # the marks' backstop: every lane from its beginning, at least this far apart…
_RESCAN_COST_FACTOR: Final = 50.0  # …and never for more than 2 % of the time
_NO_IDENTITY_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_MOST_UNKNOWN_KINDS: Final = 1_000  # that are remembered, and so told of


class Fetcher:
    """Keeps the lines supplied."""

    def __init__(
        self,
        link: Link,
        schema: str,
        jobs: Jobs,
        lines: Sequence[Line],
        lease: Lease,
        executor: Executor,
        completer: Completer,
        listener: Listener | None,
        counters: Counters,
    ) -> None:
        self._link = link
        self._schema = schema
        self._jobs = jobs
        self._lines = {line.queue: line for line in lines}
        self._lease = lease
        self._executor = executor
        self._completer = completer
        self._listener = listener
        self._counters = counters
        self._unknown_kinds: set[str] = set()
        self._parking = Parking()
        self.observers = Observers(())
        self.is_stopping = False
        self._wake = asyncio.Event()
        self._next_move_at = 0.0  # to a new identity: not faster, should lease and claims go two ways
        self.rescans = True  # off only where a test proves that the marks need no backstop

    def note_room(self) -> None:
        """A slot has become free, or outcomes were recorded of which there had been too many."""
        self._wake.set()

    def note_news(self, queue: str | None) -> None:
        """A queue may have jobs; ``None``: any of them."""
        now = time.monotonic()
        for line in self._lines.values() if queue is None else filter(None, [self._lines.get(queue)]):
            line.note_news(now)
        self._wake.set()

    async def run(self) -> None:
        """Claim until told to stop."""
        while not self.is_stopping:
            self._wake.clear()
            pause_s, failed = _LONGEST_PAUSE_S, False
            try:
                for line in self._lines.values():
                    pause_s = min(pause_s, await self._visit_alone(line))
            except DatabaseUnavailable as error:
                if self._counters.note_database_away():
                    logger.warning(
                        "the database is away, trying again; running jobs go on. If it lasts, look after "
                        "the server, its max_connections and the network: %s",
                        error,
                    )
                pause_s, failed = self._link.retry_delay_s(), True
            if failed and not self.is_stopping:
                await asyncio.sleep(pause_s)  # whatever comes meanwhile: it would fail as well
            elif pause_s > 0:
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue  # the pause is over

    async def _visit_alone(self, line: Line) -> float:
        """Visit a line so that what the server refuses there costs the other lines nothing."""
        try:
            return await self._visit(line)
        except DatabaseUnavailable:
            raise
        except Error:
            logger.exception(
                "a claim from queue %r was refused by the server and is tried again every second; "
                "`jobqctl doctor` may tell why",
                line.queue,
                extra={"queue": line.queue},
            )
            line.next_poll_at = time.monotonic() + _LONGEST_PAUSE_S
            return _LONGEST_PAUSE_S

    async def _visit(self, line: Line) -> float:
        """Claim for one line if it is time; return the seconds until it wants to be visited again."""
        identity = self._lease.current
        if identity is None:
            return _NO_IDENTITY_PAUSE_S
        wanted = 0 if self._completer.is_full or self._executor.is_clogged else line.wanted()
        if wanted == 0:
            self._disarm(line)
            return _LONGEST_PAUSE_S
        now = time.monotonic()
        if now < line.next_poll_at:
            return line.next_poll_at - now
        claimed = await self._claim(line, identity, wanted)
        took_s, now = time.monotonic() - now, time.monotonic()
        line.note_claim(wanted, len(claimed), now)
        await self._take(line, identity, claimed, now, took_s)
        await self._move_marks(line, identity)
        if claimed:
            self._disarm(line)
        elif line.should_arm() and self._listener is not None:
            self._listener.arm(line.queue)
        return max(0.0, line.next_poll_at - time.monotonic())

    def _disarm(self, line: Line) -> None:
        if self._listener is not None:
            self._listener.disarm(line.queue)

    async def _claim(self, line: Line, identity: Identity, wanted: int) -> list[Claimed]:
        await self._link.open()
        if line.marks_generation != self._link.generation:
            line.marks.forget()
            line.marks_generation = self._link.generation
        started = time.monotonic()
        below, one_above = self._executor.suspects.admission(has_slot=line.has_slot)
        try:
            claimed = await self._link.run(
                claim(
                    self._schema,
                    line.queue,
                    line.marks.ranges(),
                    wanted,
                    identity.id,
                    server=identity.server,
                    below=below,
                    one_above=one_above,
                )
            )
        except (DatabaseUnavailable, asyncio.CancelledError):
            self._lease.take_new_identity()
            raise
        self._counters.fetch.add(time.monotonic() - started)
        self._counters.note_database_back()
        self._counters.claimed += len(claimed)
        return claimed

    async def _move_marks(self, line: Line, identity: Identity) -> None:
        now = time.monotonic()
        if now - line.refreshed_at < _REFRESH_S:
            return
        line.refreshed_at = now
        is_rescan = self.rescans and now >= line.rescan_at
        if is_rescan:
            line.marks.rescan()
        ranges = line.marks.ranges()
        snapshot = await self._link.run(refresh(self._schema, line.queue, ranges, now))
        if snapshot.server != identity.server and now >= self._next_move_at:
            self._next_move_at = now + _LONGEST_PAUSE_S
            self._lease.take_new_identity()
        if line.marks.refresh(ranges, snapshot):
            line.note_news(now)
        if is_rescan:
            cost_s = time.monotonic() - now
            line.rescan_at = now + max(_RESCAN_S, cost_s * _RESCAN_COST_FACTOR)

    async def _take(
        self, line: Line, identity: Identity, claimed: Sequence[Claimed], now: float, took_s: float
    ) -> None:
        """Hand claimed jobs to the line, but those that must not run here."""
        suspects: list[Execution] = []
        plain: list[Execution] = []
        paused = self._executor.paused_kinds
        for row in claimed:
            identity.known.add((row.job_id, row.attempt))
            handler = self._jobs.lookup(row.kind) if row.kind is not None else None
            park_s = self._parking.delay_s(now) if handler is None else 0.0
            refused = refuse(row, is_known=handler is not None, is_paused=row.kind in paused, park_s=park_s)
            if handler is None or refused is not None:
                if row.kind is not None and handler is None:
                    self._note_unknown(row, row.kind, identity)
                self._completer.add(identity.id, refused or hand_back(row.job_id, row.attempt))
                continue
            execution = Execution(row, identity, line, handler, now)
            (suspects if row.crashes else plain).append(execution)
        line.note_taken(len(claimed), len(plain) + len(suspects))
        if self.observers and (suspects or plain):
            self.observers.claimed(line.queue, [one.job for one in (*plain, *suspects)], took_s)
        line.held.extend(plain)
        self._executor.fill(line)
        if suspects:
            await self._take_suspects(line, suspects)
        if line.is_paused:  # while the claim was under way
            self._executor.give_back_held(line)

    def _note_unknown(self, row: Claimed, kind: str, identity: Identity) -> None:
        """Say once that a kind has no handler here: its jobs come back again and again."""
        is_news = kind not in self._unknown_kinds and len(self._unknown_kinds) < _MOST_UNKNOWN_KINDS
        if is_news:
            self._unknown_kinds.add(kind)
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "kind %r has no handler in this worker: job %d and others of it wait, and are tried again after "
            "%.0f s or more. Start a worker that has one, name the kind in the aliases of another handler, "
            "or have the jobs cancelled: `jobqctl cancel --kind`",
            kind,
            row.job_id,
            UNKNOWN_KIND_DELAY_S,
            extra={
                "job_id": row.job_id,
                "kind": kind,
                "queue": row.queue,
                "attempt": row.attempt,
                "worker": identity.id,
            },
        )

    async def _take_suspects(self, line: Line, suspects: Sequence[Execution]) -> None:
        """Let suspects in, but none before the others are safely out of this process."""
        for execution in suspects:
            self._executor.suspects.add(execution)
        try:
            # What ended just now and is not recorded would be done again, and suspected again.
            await self._completer.flushed()
        finally:
            line.held.extendleft(reversed(suspects))  # in a stop, too: from there they are handed back
        self._executor.fill(line)
