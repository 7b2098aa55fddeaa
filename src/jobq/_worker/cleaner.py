"""The leader's cleaning: finished jobs that have reached their age, and what else has an end.

Removing keeps up with the fleet at full speed, and never takes more than half of its connection's
time for it: after a full batch it rests as long as the batch took.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseUnavailable
from jobq._statements.keys import FIRST_KEY, forget_keys, look_at_keys
from jobq._statements.retention import BATCH, Walk, read_retention, remove_finished, rules
from jobq._statements.trim import BITE, forget_log, forget_ticks, forget_workers

if TYPE_CHECKING:
    from jobq._statements.leader import Term
    from jobq._statements.retention import Removed
    from jobq._worker.link import Link
    from jobq._worker.stats import Counters

DAY_S: Final = 86_400.0
TICKS_KEPT_S: Final = 30 * DAY_S
LOG_KEPT_S: Final = 90 * DAY_S
WORKERS_KEPT_S: Final = 7 * DAY_S

_SETTINGS_S: Final = 5.0  # how soon a change of the settings is noticed
RESCAN_S: Final = 600.0  # a walk from the beginning, at least this far apart…
_RESCAN_COST_FACTOR: Final = 50.0  # …and never for more than 2 % of the time
_SHORTEST_REST_S: Final = 0.002
_MORE_S: Final = 1.0  # between two bites of what is trimmed


@dataclass(slots=True)
class _Course:
    """The removal for one age: the walk that keeps up, and now and then one over what lies behind it."""

    walk: Walk
    rescan_at: float
    behind: Walk | None = None
    cost_s: float = 0.0


class Cleaner:
    """Removes finished jobs that have reached their age. A duty of the leader.

    Args:
        link: the leader's connection.
        schema: where the queue lives.
        counters: of this process.
        limit: rows that one statement looks at.
    """

    name = "retention"
    interval_s = 2.0

    def __init__(self, link: Link, schema: str, counters: Counters, limit: int = BATCH) -> None:
        self._link = link
        self._schema = schema
        self._counters = counters
        self._limit = limit
        self._term: Term | None = None
        self._settings_at = 0.0
        self._courses: list[_Course] = []
        self._turn = 0

    async def run_once(self, term: Term) -> float | None:
        """Look at one batch, for the age whose turn it is and that has any.

        Returns:
            How long to rest after a full batch; ``None`` when all that has reached its age is gone.

        Raises:
            Deposed: the term is over.
            Error: the batch failed; the next pass goes on from the same place.
        """
        await self._prepare(term)
        for _ in range(len(self._courses)):
            course, self._turn = self._courses[self._turn], (self._turn + 1) % len(self._courses)
            started = time.monotonic()
            if await self._forward(term, course) or await self._behind(term, course):
                return max(time.monotonic() - started, _SHORTEST_REST_S)
        return None

    async def _prepare(self, term: Term) -> None:
        """Read the settings now and then. What is known of an earlier term is not believed in a new one."""
        now = time.monotonic()
        if term != self._term:
            self._term, self._courses, self._settings_at = term, [], 0.0
        if now < self._settings_at:
            return
        known = {course.walk.rule: course for course in self._courses}
        wanted = rules(await self._link.run(read_retention(self._schema)))
        self._courses = [known.get(rule) or _Course(Walk(rule), now + RESCAN_S) for rule in wanted]
        self._turn = 0 if self._turn >= len(self._courses) else self._turn
        self._settings_at = now + _SETTINGS_S

    async def _forward(self, term: Term, course: _Course) -> bool:
        """Go on where the last batch ended; return whether more may be waiting."""
        try:
            removed = await self._remove(term, course.walk)
        except DatabaseUnavailable:
            # Perhaps the way to the first row is longer than one statement may take: entries of what an
            # earlier leader removed, which a pinned horizon keeps. The walk behind comes to it.
            if course.walk.mark is None:
                course.walk = course.walk.skipping()
            raise
        course.walk = removed.walk
        return removed.is_full

    async def _behind(self, term: Term, course: _Course) -> bool:
        """When it is time, look at one batch of what stands behind the mark; return whether to go on."""
        started = time.monotonic()
        if course.behind is None:
            if started < course.rescan_at or course.walk.mark is None:
                return False
            course.behind, course.cost_s = Walk(course.walk.rule), 0.0
        walk, course.behind = course.behind, None  # a batch that fails ends it until the next time
        try:
            removed = await self._remove(term, walk)
        finally:
            now = time.monotonic()
            course.cost_s += now - started
            course.rescan_at = now + max(RESCAN_S, course.cost_s * _RESCAN_COST_FACTOR)
        mark, front = removed.walk.mark, course.walk.mark
        if removed.is_full and mark is not None and front is not None and mark < front:
            course.behind = removed.walk
        return course.behind is not None

    async def _remove(self, term: Term, walk: Walk) -> Removed:
        removed = await self._link.run(remove_finished(self._schema, term, walk, self._limit))
        self._counters.removed += removed.jobs
        return removed


class Trimmer:
    """Removes old ticks, entries of the operators' log, ended workers, and keys that nothing needs.

    Args:
        link: the leader's connection.
        schema: where the queue lives.
    """

    name = "trimming"
    interval_s = 600.0

    def __init__(self, link: Link, schema: str) -> None:
        self._link = link
        self._schema = schema
        self._place = FIRST_KEY

    async def run_once(self, term: Term) -> float | None:
        """Take one bite of each; return a short pause while there is more.

        Raises:
            Deposed: the term is over.
            Error: one of them failed; those before it are done.
        """
        run, schema = self._link.run, self._schema
        counts = [
            await run(forget_ticks(schema, term, TICKS_KEPT_S)),
            await run(forget_log(schema, term, LOG_KEPT_S)),
            await run(forget_workers(schema, term, WORKERS_KEPT_S)),
        ]
        stale, self._place = await run(look_at_keys(schema, self._place))
        if stale:
            await run(forget_keys(schema, term, stale))
        return _MORE_S if max(counts) >= BITE or self._place != FIRST_KEY else None
