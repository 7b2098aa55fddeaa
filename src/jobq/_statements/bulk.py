"""What is done to many jobs at once, chosen by a filter: batch by batch, each in one statement.

A batch looks at so many rows of one table, in the order of the walk (`filter`), and changes those
that match: found by ctid and locked in ctid order, so that two operators with overlapping jobs wait
for each other and never in a circle. No lock outlives its batch. What was interrupted leaves whole
batches, and is taken up by doing the same again, since what is done no longer matches or is done
once more to no effect.

An action by a job's id is a batch of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from jobq._errors import ConfigError, JobConflict
from jobq._kinds.options import changes
from jobq._messages import shown
from jobq._operation import Call, Operation, Rows, again_after_deadlock, in_schema
from jobq._statements.bulk_sql import WRITERS, Settings, When, Written
from jobq._statements.control import control_sql
from jobq._statements.filter import (
    JobFilter,
    Place,
    Query,
    checked_filter,
    first_place,
    next_place,
    seen,
    window,
)
from jobq._statements.operate import LOOKS, checked_id, get_job
from jobq._statements.operator_log import Entry, logged_as
from jobq._types import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

Action: TypeAlias = Literal["cancel", "retry", "delete", "reschedule", "move"]

MAX_BATCH: Final = 1_000
MAX_LISTED: Final = 1_000  # conflicts that a result names; all are counted
COUNTED_BY_DEFAULT: Final = 10_000
_COUNT_WINDOW: Final = 20_000

_WAITING: Final = (JobState.READY, JobState.SCHEDULED)

# To which jobs an action applies, in the order in which it goes through them. Those that come from
# another table of the same action must not be met again: rescheduled ones go from ready to scheduled.
APPLIES_TO: Final[Mapping[Action, tuple[JobState, ...]]] = {
    "cancel": (*_WAITING, JobState.RUNNING),
    "retry": (JobState.DISCARDED, JobState.CANCELLED, JobState.COMPLETED),
    "delete": (*_WAITING, JobState.DISCARDED, JobState.CANCELLED, JobState.COMPLETED),
    "reschedule": (JobState.SCHEDULED, JobState.READY),
    "move": _WAITING,
}
_NOT_UNASKED: Final = {"retry": JobState.COMPLETED}  # done again only when the filter names it


@dataclass(frozen=True, slots=True)
class BulkConflict:
    """A job that could not be retried.

    Attributes:
        job_id: which.
        holder: the job that holds its unique key; ``None`` when it got the key at this very moment.
    """

    job_id: int
    holder: int | None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What a bulk action did, or has done so far.

    Attributes:
        action: ``cancel``, ``retry``, ``delete``, ``reschedule`` or ``move``.
        changed: jobs that were changed.
        requested: running jobs whose workers were asked to stop them.
        conflicts: jobs that another one's unique key kept from being retried; ``conflicting`` are the
            first 1,000 of them.
        looked_at: rows that were looked at.
    """

    action: str
    changed: int = 0
    requested: int = 0
    conflicts: int = 0
    conflicting: tuple[BulkConflict, ...] = ()
    looked_at: int = 0


@dataclass(frozen=True, slots=True)
class BulkCount:
    """How many jobs a filter chooses.

    Attributes:
        jobs: how many were found.
        is_exact: whether that is all; else there are at least so many.
    """

    jobs: int
    is_exact: bool


class BulkRun:
    """One bulk action on its way: its steps are operations, to be run one after the other.

    Args:
        schema: where the queue lives.
        action: what to do.
        chosen: to which jobs.
        entry: what the operator log says.
        settings: what the action needs to know beside.
        batch: rows that one step looks at, at the most.

    Raises:
        ConfigError: the filter chooses everything, or only jobs to which the action does not apply.
    """

    def __init__(
        self, schema: str, action: Action, chosen: JobFilter, entry: Entry, settings: Settings, batch: int
    ) -> None:
        self._schema = schema
        self._action: Action = action
        self._chosen = chosen
        self._entry = entry.params
        self._settings = settings
        self._batch = _checked_batch(batch)
        self._walk = _walk(action, chosen)
        self._place = first_place(self._walk)
        self._log_id: int | None = None
        self.result = BulkResult(action)

    def step(self) -> Operation[None] | None:
        """Return the next batch; ``None``: all is done."""
        return None if self._place is None else self._step(self._place)

    def _step(self, place: Place) -> Operation[None]:
        query = Query()
        step = window(query, self._chosen, place, self._batch)
        written = WRITERS[self._action](query, place.state, self._settings, self._entry)
        sql = f"""
with {step.ctes}, {written.ctes}, {self._logged(query, written)}
select {seen(step, place.state)}, {written.done}, {written.conflicting}, {written.holders},
       (select id from logged), {written.sent}
"""
        rows = yield from _redone(Call(control_sql(sql, self._schema), query.params, replan=True))
        count, job_id, ended, done, conflicting, holders, self._log_id, _ = rows[0]
        self._note(count, done, list(zip(conflicting or [], holders or [], strict=True)), place.state)
        self._place = next_place(self._walk, place, step, count, job_id, ended)

    def _logged(self, query: Query, written: Written) -> str:
        """One entry for all: the first batch makes it, the others add to it."""
        if self._log_id is None:
            first = len(query.params) + 1
            query.params += self._entry
            return logged_as(first, jobs=written.done)
        return f"""logged as (
    update {{schema}}.operator_log set jobs = jobs + {written.done}
    where id = {query.bind(self._log_id, "int8")} returning id
)"""

    def _note(self, count: int, done: int, conflicts: list[tuple[int, int | None]], state: JobState) -> None:
        before = self.result
        room = MAX_LISTED - len(before.conflicting)
        asked = done if state is JobState.RUNNING else 0
        self.result = BulkResult(
            before.action,
            before.changed + done - asked,
            before.requested + asked,
            before.conflicts + len(conflicts),
            (*before.conflicting, *(BulkConflict(*conflict) for conflict in conflicts[:room])),
            before.looked_at + count,
        )


def _redone(call: Call) -> Operation[Rows]:
    def operation() -> Operation[Rows]:
        return (yield call)

    return again_after_deadlock(operation)


def _walk(action: Action, chosen: JobFilter) -> list[JobState]:
    if chosen.is_empty:
        raise ConfigError(f"{action}: the filter chooses every job; say which, if only by their states")
    applies = APPLIES_TO[action]
    walk = chosen.walk(applies)
    if not walk:
        names = ", ".join(state.value for state in applies)
        raise ConfigError(f"{action}: applies to jobs that are {names}, and the filter chooses none of these")
    return walk if chosen.states else [state for state in walk if state is not _NOT_UNASKED.get(action)]


def _checked_batch(batch: object) -> int:
    if not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise ConfigError(f"batch={shown(batch)}: 1 to {MAX_BATCH:,}")
    return int(batch)


def count_jobs(
    schema: str, chosen: JobFilter, action: Action | None, limit: int | None
) -> Operation[BulkCount]:
    """Count the jobs that a filter chooses, or that an action would be applied to.

    Raises:
        ConfigError: the action is unknown or does not apply, or the limit is less than 1.
    """
    if limit is not None and (not isinstance(cast("object", limit), int) or limit < 1):
        raise ConfigError(f"limit={shown(limit)}: 1 or more, or None to count all")
    if action is not None and not (isinstance(cast("object", action), str) and action in APPLIES_TO):
        raise ConfigError(f"action={shown(action)}: one of {', '.join(APPLIES_TO)}")
    chosen = checked_filter(chosen)
    walk = chosen.walk() if action is None else _walk(action, chosen)
    place, jobs = first_place(walk), 0
    while place is not None and (limit is None or jobs < limit):
        query = Query()
        step = window(query, chosen, place, _COUNT_WINDOW)
        sql = f"with {step.ctes} select {seen(step, place.state)}, (select count(*) from m)"
        rows = yield Call(in_schema(sql, schema), query.params, replan=True)
        count, job_id, ended, matches = rows[0]
        jobs += matches
        place = next_place(walk, place, step, count, job_id, ended)
    return BulkCount(jobs, is_exact=place is None)


def delete_job(schema: str, job_id: int, reason: str = "", by: str | None = None) -> Operation[None]:
    """Remove a job that waits or has ended, with all that belongs to it.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it runs.
    """
    yield from _to_one(schema, "delete", job_id, Entry("delete", {"job": checked_id(job_id)}, by, reason))


def reschedule_job(
    schema: str,
    job_id: int,
    run_at: datetime | None,
    delay: timedelta | None,
    reason: str = "",
    by: str | None = None,
    *,
    notify: bool = True,
) -> Operation[None]:
    """Choose anew when a job that waits becomes ready.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it does not wait.
        ConfigError: not exactly one of ``run_at`` and ``delay``, or an impossible one.
    """
    when = read_when(run_at, delay)
    entry = Entry("reschedule", {"job": checked_id(job_id), **when.described()}, by, reason)
    yield from _to_one(schema, "reschedule", job_id, entry, Settings(when=when, notify=notify))


def move_job(
    schema: str,
    job_id: int,
    queue: str | None,
    priority: int | None,
    reason: str = "",
    by: str | None = None,
    *,
    notify: bool = True,
) -> Operation[None]:
    """Give a job that waits another queue or priority.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it does not wait.
        ConfigError: neither is given, or one is impossible.
    """
    where = read_where(queue, priority)
    entry = Entry("move", {"job": checked_id(job_id), **where}, by, reason)
    settings = Settings(**where, notify=notify)
    yield from _to_one(schema, "move", job_id, entry, settings)


def _to_one(
    schema: str, action: Action, job_id: int, entry: Entry, settings: Settings | None = None
) -> Operation[None]:
    """Do it to one job, looking again when it is on its way between two tables."""
    settings, params = settings or Settings(), entry.params
    chosen = JobFilter(ids=[job_id])
    for _ in range(LOOKS):
        for state in APPLIES_TO[action]:
            query = Query()
            step = window(query, chosen, Place(state), 1)
            written = WRITERS[action](query, state, settings, params)
            first = len(query.params) + 1
            logged = logged_as(first, jobs="1", where=f"{written.done} > 0")
            sql = f"with {step.ctes}, {written.ctes}, {logged} select {written.done}, {written.sent}"
            rows = yield from _redone(Call(control_sql(sql, schema), [*query.params, *params], replan=True))
            if rows[0][0]:
                return
        info = yield from get_job(schema, job_id)
        if info.state not in APPLIES_TO[action]:
            names = " or ".join(state.value for state in APPLIES_TO[action])
            raise JobConflict(f"{action}: job {job_id} is {info.state.value}, and has to be {names}")
    raise JobConflict(f"job {job_id} is being moved by others just now; try again")


def read_when(run_at: datetime | None, delay: timedelta | None) -> When:
    """Return the one of both that is given, checked.

    Raises:
        ConfigError: none or both are, or it cannot be what it is.
    """
    if (run_at is None) == (delay is None):
        raise ConfigError("reschedule: give run_at or delay, one of them")
    fields: dict[str, Any] = changes({"run_at": run_at, "delay": delay})
    return When(fields.get("run_at"), fields.get("delay_s") or 0.0)


def read_where(queue: str | None, priority: int | None) -> dict[str, Any]:
    """Return what of both is given, checked.

    Raises:
        ConfigError: nothing is, or it cannot be what it is.
    """
    given = {"queue": queue, "priority": priority}
    found = changes({name: value for name, value in given.items() if value is not None})
    if not found:
        raise ConfigError("move: give queue, priority or both")
    return found
