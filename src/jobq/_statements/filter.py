"""Which jobs: a filter, and the way through the tables that finds them in short steps.

A walk goes state by state, for each state stands in one table and has one index that serves it: live
jobs by id, ended ones by when they ended. Each step reads a window of so many rows in that order and
only then asks what the filter asks, so that no step is long however few match and whatever the
statistics say. A walk begins at the newest and goes back in time: it ends, whatever comes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from jobq._errors import ConfigError
from jobq._limits import MAX_WAIT
from jobq._messages import shown, told
from jobq._operation import Call, Operation, in_schema
from jobq._statements.operate import instant, job_info
from jobq._statements.operator_log import check_text
from jobq._types import JobState

if TYPE_CHECKING:
    from jobq._types import JobInfo

MAX_IDS: Final = 100_000  # of one filter
MAX_NAMES: Final = 100  # queues, kinds or tags of one filter
MAX_PAGE: Final = 1_000
LOOKED_THROUGH: Final = 20_000  # rows that one page looks through at the most
_FIRST_WINDOW: Final = 500
_WINDOW: Final = 5_000
_LAST_ID: Final = 2**63 - 1
_IDS: Final = range(_LAST_ID + 1)  # of jobs and workers; others are nobody's

# What people look for comes first.
WALK: Final = (
    JobState.RUNNING,
    JobState.READY,
    JobState.SCHEDULED,
    JobState.DISCARDED,
    JobState.CANCELLED,
    JobState.COMPLETED,
)
_NULLS: Final = {
    "reason": "null::text",
    "run_at": "null::timestamptz",
    "claimed_at": "null::timestamptz",
    "finished_at": "null::timestamptz",
    "worker_id": "null::int8",
}
_COLUMNS: Final = {
    JobState.READY: {"run_at": "t.ready_at"},
    JobState.SCHEDULED: {"reason": "t.reason", "run_at": "t.run_at"},
    JobState.RUNNING: {"claimed_at": "t.claimed_at", "worker_id": "t.worker_id"},
}
_ENDED: Final = {name: f"t.{name}" for name in ("state", "reason", "claimed_at", "finished_at", "worker_id")}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Chooses jobs: those to which all that is given applies.

    Attributes:
        ids: these jobs and no others; at most 100,000. An id that no job can have chooses none.
        queues, kinds: in one of these queues, of one of these kinds.
        states: in one of these states (:class:`jobq.JobState` or its text).
        tags: with all of these tags.
        older_than, newer_than: by age: the time since it ended, for a job that has; since it was
            enqueued, for one that has not.
        error: a text that its last error contains, upper or lower case alike, in ``type: message``.
        worker: the id of the worker that runs it, or ran it last.

    Raises:
        ConfigError: names what cannot be.
    """

    ids: Sequence[int] | None = None
    queues: Sequence[str] = ()
    kinds: Sequence[str] = ()
    states: Sequence[JobState | str] = ()
    tags: Sequence[str] = ()
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    error: str | None = None
    worker: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen for everybody else
        if self.ids is not None:
            ids = {_whole("ids", job_id) for job_id in _sequence("ids", self.ids, MAX_IDS)}
            put(self, "ids", tuple(sorted({i for i in ids if i in _IDS}, reverse=True)))
        for name in ("queues", "kinds", "tags"):
            put(self, name, _names(name, getattr(self, name)))
        put(self, "states", tuple(map(_state, _sequence("states", self.states, len(WALK)))))
        for name in ("older_than", "newer_than"):
            _check_age(name, getattr(self, name))
        if self.error is not None:
            put(self, "error", check_text("error", self.error, 1_000))
            if not self.error:
                raise ConfigError("error='': a text to look for")
        if self.worker is not None:
            put(self, "worker", _whole("worker", self.worker))
            if self.worker not in _IDS:
                raise ConfigError(f"worker={shown(self.worker)}: a worker's id")

    @property
    def is_empty(self) -> bool:
        """Whether it chooses every job that there is."""
        return not self.described()

    def described(self) -> dict[str, Any]:
        """Return what was given, as JSON can hold it; of many ids, how many and the first."""
        given: dict[str, Any] = {}
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if value is None or (value == () and field.name != "ids"):  # no ids choose no job
                continue
            given[field.name] = value.total_seconds() if isinstance(value, timedelta) else value
        if self.ids is not None and len(self.ids) > MAX_NAMES:
            given["ids"] = [*self.ids[:MAX_NAMES], f"and {len(self.ids) - MAX_NAMES} more"]
        return given

    def walk(self, among: Sequence[JobState] = WALK) -> list[JobState]:
        """Return the states to go through, in the order of ``among``."""
        return [state for state in among if not self.states or state in self.states]


def checked_filter(chosen: object) -> JobFilter:
    """Return what a call was given as its filter.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(chosen, JobFilter):
        raise ConfigError(f"which jobs? A jobq.JobFilter says it, not {shown(chosen)}")
    return chosen


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of a list.

    Attributes:
        jobs: what was found.
        next: for the next page's ``after``; ``None`` when there is no more.
    """

    jobs: tuple[JobInfo, ...]
    next: str | None


class Place(NamedTuple):
    """How far a walk has come: everything at and before it was looked at.

    Attributes:
        state: where in the walk.
        job_id, ended: the last row's; ``ended`` is empty for live jobs and for a walk by ids.
    """

    state: JobState
    job_id: int = _LAST_ID
    ended: str = ""

    def __str__(self) -> str:
        return f"{self.state.value}.{self.job_id}.{self.ended}"

    @classmethod
    def read(cls, text: object) -> Place:
        """Return the place that a text stands for.

        Raises:
            ConfigError: it is none.
        """
        try:
            state, job_id, ended = str.split(cast("str", text), ".", 2)
            place = cls(JobState(state), int(job_id), _moment(ended) if ended else "")
        except (TypeError, ValueError):
            place = None
        if place is None or place.job_id not in _IDS or (place.ended and not place.state.is_terminal):
            raise ConfigError("after: the `next` of a page")
        return place


class Query:
    """A statement's parameters, numbered as they come."""

    def __init__(self) -> None:
        self.params: list[Any] = []

    def bind(self, value: object, type_: str) -> str:
        """Take a value; return what stands for it."""
        self.params.append(list(cast("tuple[Any]", value)) if isinstance(value, tuple) else value)
        return f"${len(self.params)}::{type_}"


class Window(NamedTuple):
    """One step of a walk.

    Attributes:
        ctes: ``w``, the rows of the window; ``m``, those of them that match.
        size: how many rows it may have; fewer mean the end of this state.
        ids: which jobs it looks at, in a walk by ids.
    """

    ctes: str
    size: int
    ids: Sequence[int] | None


def window(query: Query, chosen: JobFilter, place: Place, size: int, limit: int | None = None) -> Window:
    """Compose one step, of ``size`` rows looked at and at most ``limit`` that match."""
    ids = None
    if chosen.ids is not None:
        ids = [job_id for job_id in chosen.ids if job_id < place.job_id][:size]
        rows = _rows_by_id(query, place, ids)
    else:
        rows = _rows(query, chosen, place, size)
    most = "" if limit is None else f" limit {query.bind(limit, 'int4')}"
    ctes = f"""w as materialized ({rows}
), m as materialized (
    select w.* from w {_matching(query, chosen, place.state)}
    order by {_order(place.state, by_id=ids is not None)}{most}
)"""
    return Window(ctes, size, ids)


def _table(state: JobState) -> str:
    return "finished" if state.is_terminal else state.value


def _order(state: JobState, direction: str = "desc", *, by_id: bool) -> str:
    if by_id or not state.is_terminal:
        return f"w.job_id {direction}"
    return f"w.finished_at {direction}, w.job_id {direction}"


def _columns(state: JobState) -> str:
    own = _NULLS | (_ENDED if state.is_terminal else _COLUMNS[state])
    others = ", ".join(f"{text} as {name}" for name, text in own.items())
    return f"t.ctid as tid, t.job_id, t.queue, t.priority, t.attempt, t.failures, t.crashes, {others}"


def _rows(query: Query, chosen: JobFilter, place: Place, size: int) -> str:
    before = query.bind(place.job_id, "int8")
    if not place.state.is_terminal:
        where, order = f"t.job_id < {before}", "t.job_id desc"
    else:
        ended = query.bind(place.ended or "infinity", "timestamptz")
        where = f"t.finished_at <= {ended} and (t.finished_at < {ended} or t.job_id < {before})"
        if place.state is not JobState.COMPLETED:
            where += f" and t.state = '{place.state.value}'"
        order = "t.finished_at desc, t.job_id desc"
        for sign, age in (("<=", chosen.older_than), (">", chosen.newer_than)):
            if age is not None:
                where += f"\n      and t.finished_at {sign} {_ago(query, age)}"
    return f"""
    select {_columns(place.state)} from {{schema}}.{_table(place.state)} t
    where {where} order by {order} limit {query.bind(size, "int4")}"""


def _rows_by_id(query: Query, place: Place, ids: Sequence[int]) -> str:
    state = f" and state = '{place.state.value}'" if place.state.is_terminal else ""
    return f"""
    select {_columns(place.state)} from pg_catalog.unnest({query.bind(ids, "int8[]")}) i(id)
    cross join lateral (
        select ctid, * from {{schema}}.{_table(place.state)} where job_id = i.id{state} limit 1) t"""


def _ago(query: Query, age: timedelta) -> str:
    return f"statement_timestamp() - {query.bind(age.total_seconds(), 'float8')} * interval '1 second'"


def _matching(query: Query, chosen: JobFilter, state: JobState) -> str:
    """Return the joins and conditions that make rows of a window matches."""
    joins, where = "", ["true"]
    if state is JobState.COMPLETED:
        # Not in the window: without statistics the planner takes these for few, and reads the whole table.
        where.append("w.state = 'completed'")
    if chosen.queues:
        where.append(f"w.queue::text = any ({query.bind(chosen.queues, 'text[]')})")
    if chosen.worker is not None:
        where.append(f"w.worker_id = {query.bind(chosen.worker, 'int8')}")
    ages = [
        (sign, age) for sign, age in (("<=", chosen.older_than), (">", chosen.newer_than)) if age is not None
    ]
    if chosen.kinds or chosen.tags or (ages and not state.is_terminal):
        joins += """
    cross join lateral (select kind, tags, created_at from {schema}.job where id = w.job_id limit 1) j"""
        if chosen.kinds:
            where.append(f"j.kind::text = any ({query.bind(chosen.kinds, 'text[]')})")
        if chosen.tags:
            where.append(f"j.tags operator(pg_catalog.@>) {query.bind(chosen.tags, 'text[]')}")
    column = "w.finished_at" if state.is_terminal else "j.created_at"
    where += [f"{column} {sign} {_ago(query, age)}" for sign, age in ages]
    if chosen.error is not None:
        joins += """
    cross join lateral (select type || ': ' || message as text from {schema}.attempt_error
        where job_id = w.job_id order by attempt desc limit 1) e"""
        where.append(f"position(lower({query.bind(chosen.error, 'text')}) in lower(e.text)) > 0")
    return f"{joins}\n    where {' and '.join(where)}"


def seen(step: Window, state: JobState) -> str:
    """Return the columns that tell how far a window came: rows, last id, when that one ended."""
    last = f"from w order by {_order(state, 'asc', by_id=step.ids is not None)} limit 1"
    return f"""(select count(*) from w), (select w.job_id {last}),
       (select {instant("w.finished_at")} {last})"""


def next_place(
    walk: Sequence[JobState], place: Place, step: Window, count: int, job_id: int | None, ended: str | None
) -> Place | None:
    """Return where a walk goes on after a window of which ``seen`` said this; ``None``: it is over."""
    if step.ids is not None:
        count, job_id, ended = len(step.ids), step.ids[-1] if step.ids else None, None
    if count == step.size and job_id is not None:
        return Place(place.state, job_id, ended or "")
    later = walk[walk.index(place.state) + 1 :]
    return Place(later[0]) if later else None


def list_jobs(schema: str, chosen: JobFilter | None, after: str | None, limit: int) -> Operation[JobPage]:
    """Return one page of jobs, state by state and the newest first.

    Raises:
        ConfigError: ``limit`` or ``after`` cannot be what it is.
    """
    limit = _whole("limit", limit)
    if not 1 <= limit <= MAX_PAGE:
        raise ConfigError(f"limit={shown(limit)}: 1 to {MAX_PAGE:,}")
    chosen = JobFilter() if chosen is None else checked_filter(chosen)
    walk = chosen.walk()
    place = first_place(walk) if after is None else Place.read(after)
    if place is not None and place.state not in walk:
        raise ConfigError("after: the `next` of a page with the same filter")
    found: list[JobInfo] = []
    left = LOOKED_THROUGH
    size = min(max(limit, _FIRST_WINDOW), _WINDOW)
    while place is not None and len(found) < limit and left > 0:
        size = min(size, left)
        jobs, count, place = yield from _page(schema, chosen, walk, place, size, limit - len(found))
        found += jobs
        left -= count
        size = _WINDOW
    return JobPage(tuple(found), None if place is None else str(place))


def _moment(text: str) -> str:
    """Return a moment as a page writes it, in UTC; anything else is a ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.utcoffset() != timedelta(0):
        raise ValueError
    return moment.isoformat()


def first_place(walk: Sequence[JobState]) -> Place | None:
    """Return where a walk begins."""
    return Place(walk[0]) if walk else None


def _page(
    schema: str, chosen: JobFilter, walk: Sequence[JobState], place: Place, size: int, limit: int
) -> Operation[tuple[list[JobInfo], int, Place | None]]:
    query = Query()
    step = window(query, chosen, place, size, limit)
    rows = yield Call(in_schema(_listing(step, place.state), schema), query.params, replan=True)
    count, job_id, ended = rows[0][:3]
    jobs = [job_info(row[3:25]) for row in rows if row[3] is not None]
    if len(jobs) < limit:
        return jobs, count, next_place(walk, place, step, count, job_id, ended)
    last = next(row for row in reversed(rows) if row[3] is not None)
    ended = last[22] if place.state.is_terminal and chosen.ids is None else None
    return jobs, count, Place(place.state, last[3], ended or "")


def _listing(step: Window, state: JobState) -> str:
    result = "(select result::text from {schema}.finished where job_id = w.job_id limit 1)"
    result = result if state.is_terminal else "null::text"
    return f"""
with {step.ctes}, p as materialized (
    select w.job_id, '{state.value}', w.reason, j.kind, w.queue, w.priority, j.args::text, j.meta::text,
           pg_catalog.to_jsonb(j.tags)::text, w.attempt, w.failures, w.crashes, j.max_attempts,
           j.timeout_s::text, j.unique_name, {instant("j.created_at")}, {instant("w.run_at")},
           {instant("j.expires_at")}, {instant("w.claimed_at")}, {instant("w.finished_at")}, w.worker_id,
           {result}, row_number() over (order by {_order(state, by_id=step.ids is not None)}) as place
    from m w cross join lateral (select * from {{schema}}.job where id = w.job_id limit 1) j
)
select {seen(step, state)}, p.* from (select) one left join p on true order by p.place
"""


def _sequence(name: str, values: object, most: int) -> Sequence[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ConfigError(f"{name}: a list or tuple, not {type(values).__name__}")
    try:
        found = tuple(islice(cast("Sequence[object]", values), most + 1))  # len() cannot tell of every range
    except Exception as error:  # of a sequence of the user's own
        raise ConfigError(f"{name}: {told(error)}") from error
    if len(found) > most:
        raise ConfigError(f"{name}: at most {most:,}")
    return found


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: {shown(value)} is no integer")
    return int(value)


def _names(name: str, values: object) -> tuple[str, ...]:
    texts = tuple(check_text(name, text, 128) for text in _sequence(name, values, MAX_NAMES))
    if "" in texts:
        raise ConfigError(f"{name}: an empty name is nobody's")
    return texts


def _state(value: object) -> JobState:
    names = [state.value for state in JobState]
    if not isinstance(value, str) or (name := str.__str__(value)) not in names:
        raise ConfigError(f"states: {shown(value)} is none of {', '.join(names)}")
    return JobState(name)


def _check_age(name: str, age: object) -> None:
    if age is not None and not (isinstance(age, timedelta) and timedelta(0) <= age <= MAX_WAIT):
        raise ConfigError(f"{name}={shown(age)}: a timedelta, 0 or more, at most 100 years")
