"""The leader's duty that makes the jobs of schedules.

A pass looks once at all schedules in force and deals with those whose tick has come, by the
database's clock; the next pass is when the next tick comes, and never more than a second later, so
that what was added, resumed or declared meanwhile is seen. A schedule that fails is left alone for a
while, its problem shown, and the others go on.
"""

from __future__ import annotations

import logging
import random
import time
from datetime import datetime, timedelta
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseUnavailable
from jobq._kinds.schedule import decide
from jobq._statements.leader import Deposed
from jobq._statements.periodic import ahead, fire, look, move, pass_over, prune, set_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._statements.leader import Term
    from jobq._statements.periodic import Fired, Row
    from jobq._worker.link import Link

logger = logging.getLogger("jobq.scheduler")

_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing
_INTERVAL_S: Final = 1.0
_SHORTEST_PAUSE_S: Final = 0.002
_BATCH: Final = 100  # schedules of one pass
_TICKS_A_PASS: Final = 20  # of one schedule that catches up, so that the others have their turn
_SET_ASIDE_S: Final = 10.0  # a schedule that failed
_MAX_PROBLEM: Final = 1_000  # characters
_CLOCK_STEP: Final = timedelta(seconds=1)  # the database's clock went back by more than a clock may drift
_PRUNE_EVERY_S: Final = 600.0
_PRUNE_BATCH: Final = 5_000
_MOST_SKIPS: Final = 10_000  # schedules whose reason is remembered
TICKS_KEPT_S: Final = 7 * 86_400.0


class Scheduler:
    """Makes the jobs of schedules, as a duty of the leader.

    Args:
        link: the duties' connection.
        schema: where the queue lives.
        notify: whether new jobs wake waiting workers.
        now: replaces the database's clock in tests.
    """

    def __init__(
        self, link: Link, schema: str, *, notify: bool, now: Callable[[], datetime] | None = None
    ) -> None:
        self.name = "periodic"
        self.interval_s = _INTERVAL_S
        self._link = link
        self._schema = schema
        self._notify = notify
        self._now = now or _no_clock
        self._term: Term | None = None
        self._set_aside: dict[str, float] = {}  # until when, by the local monotonic clock
        self._unanswered: str | None = None  # the schedule that the database did not answer about
        self._seen: tuple[datetime, float] | None = None  # the database's time, and ours then
        self._prune_at = 0.0
        self._skips: dict[str, str] = {}  # why schedules made no job at their last tick

    async def run_once(self, term: Term) -> float:
        """Deal with the ticks that have come; return the seconds until the next pass."""
        started = time.monotonic()
        leave = [name for name, until in self._set_aside.items() if until > started]
        self._set_aside = {name: self._set_aside[name] for name in leave}
        seen = await self._link.run(look(self._schema, leave, _BATCH, now=self._now()))
        if term != self._term or self._went_back(seen.now, started):
            await self._resync(term, leave)
            self._term = term
        self._seen = (seen.now, started)
        wakes = [await self._serve(term, row, seen.now) for row in seen.due]
        if seen.next_at is not None:
            wakes.append(seen.next_at)
        await self._prune(term, started)
        if seen.is_full or not wakes:
            return 0.0 if seen.is_full else self.interval_s
        wait_s = (min(wakes) - seen.now).total_seconds() - (time.monotonic() - started)
        return min(self.interval_s, max(wait_s, _SHORTEST_PAUSE_S))

    async def _serve(self, term: Term, row: Row, now: datetime) -> datetime:
        """Deal with one schedule that is due; return when it is to be looked at again."""
        try:
            look_at = await self._tick(term, row, now)
        except Deposed:
            raise
        except Exception as error:
            if isinstance(error, DatabaseUnavailable) and self._unanswered != row.name:
                # The server is away, or this schedule waits for a lock that somebody keeps: if it is
                # the one that fails the next time as well, it is the schedule.
                self._unanswered = row.name
                raise
            self._unanswered = None
            await self._leave_alone(term, row.name, error)
            return now + timedelta(seconds=_SET_ASIDE_S)
        if self._unanswered == row.name:
            self._unanswered = None
        return look_at

    async def _leave_alone(self, term: Term, name: str, error: Exception) -> None:
        """Show what is wrong with a schedule, and try it again later."""
        problem = f"{type(error).__name__}: {error}"[:_MAX_PROBLEM]
        is_news = await self._link.run(set_problem(self._schema, term, name, problem))
        self._set_aside[name] = time.monotonic() + _SET_ASIDE_S
        if is_news:
            logger.error(
                "schedule %r cannot tick and is tried again every %.0f s; the others go on. "
                "See `jobqctl periodic list`: %s",
                name,
                _SET_ASIDE_S,
                problem,
                extra={"schedule": name},
            )

    async def _tick(self, term: Term, row: Row, now: datetime) -> datetime:
        timetable = row.timetable
        if row.next_at is None:
            next_at = timetable.next_after(now)
            await self._link.run(move(self._schema, term, [(row.name, None, next_at)]))
            return next_at
        due = decide(timetable, row.catch_up, row.catch_up_max, row.next_at, now)
        if due.dropped_until is not None:
            await self._pass_over(term, row, due.dropped_until)
            row = row._replace(next_at=due.dropped_until)
        for tick, next_at in islice(pairwise([*due.fire, due.next_at]), _TICKS_A_PASS):
            job = row.job(tick, _RNG.uniform(0.0, row.jitter_s))
            fired = await self._link.run(
                fire(self._schema, term, row, tick, next_at, job, notify=self._notify)
            )
            self._note_skip(row.name, tick, fired)
            row = row._replace(next_at=next_at)
        assert row.next_at is not None
        return row.next_at

    def _note_skip(self, name: str, tick: datetime, fired: Fired) -> None:
        """Say that a tick makes no job: once, until it makes one or there is another reason."""
        if fired.skipped is None:
            if not fired.overtaken:
                self._skips.pop(name, None)
            return
        is_news = self._skips.get(name) != fired.skipped
        if len(self._skips) >= _MOST_SKIPS:
            self._skips.clear()
        self._skips[name] = fired.skipped
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "schedule %r makes no job at %s, and is silent about it as long as it has the same reason: %s",
            name,
            tick.isoformat(),
            fired.skipped,
            extra={"schedule": name},
        )

    async def _pass_over(self, term: Term, row: Row, until: datetime) -> None:
        assert row.next_at is not None
        reason = f"missed, as all ticks until {until.isoformat()}"
        if await self._link.run(pass_over(self._schema, term, row, until, reason)):
            logger.warning(
                "schedule %r: its ticks from %s until %s were missed and make no job (catch_up=%r)",
                row.name,
                row.next_at.isoformat(),
                until.isoformat(),
                row.catch_up,
                extra={"schedule": row.name},
            )

    def _went_back(self, now: datetime, started: float) -> bool:
        if self._seen is None:
            return True
        then, at = self._seen
        return now < then + timedelta(seconds=started - at) - _CLOCK_STEP

    async def _resync(self, term: Term, leave: list[str]) -> None:
        """Let schedules wait for their next tick, where the clock was set back after a later one."""
        after = ""
        while True:
            page = await self._link.run(ahead(self._schema, after, leave, _BATCH, now=self._now()))
            moves: list[tuple[str, datetime | None, datetime]] = []
            for one in page:
                try:
                    next_at = one.next_tick()
                except Exception:
                    logger.debug("schedule %r cannot be understood here", one.name, exc_info=True)
                else:
                    if next_at < one.next_at:
                        moves.append((one.name, one.next_at, next_at))
            if moves:
                names = await self._link.run(move(self._schema, term, moves))
                logger.warning("the database's clock went back: %s tick again", ", ".join(names))
            if len(page) < _BATCH:
                return
            after = page[-1].name

    async def _prune(self, term: Term, started: float) -> None:
        if started < self._prune_at:
            return
        count = await self._link.run(prune(self._schema, term, TICKS_KEPT_S, _PRUNE_BATCH))
        self._prune_at = started + (_PRUNE_EVERY_S if count < _PRUNE_BATCH else _INTERVAL_S)


def _no_clock() -> None:
    return None
