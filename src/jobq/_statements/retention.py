"""How long finished jobs are kept: the settings, and the statements that remove what is older.

Jobs leave in the order in which they ended, by the index on ``finished_at``, a batch a statement, with
all that belongs to them. Settings differ by state and queue, so there is one walk for each distinct
age: it passes every row that has reached that age, and removes those whose age it is.

A walk remembers how far it has come (`Walk`). Without that, each pass would step over the entries of
all that it has removed before, which stay in the index while some transaction pins the vacuum horizon.
The memory is a hint, kept by the leader: a row that comes to stand behind the mark (an outcome
whose transaction stayed open, a clock that was set back) is found when the walk begins anew.

The row of a job's unique key is stale once the job is gone, and is removed in a transaction after that
(`keys.forget_keys`). Should that fail, the walk over all keys finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from jobq._errors import ConfigError
from jobq._kinds.options import changes
from jobq._messages import shown
from jobq._operation import Call, Operation, array_literal, in_schema
from jobq._statements.keys import KeyRow, forget_keys
from jobq._statements.leader import LED, Deposed, Term
from jobq._statements.operator_log import Entry, logged_as

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

Keep: TypeAlias = Literal["keep"]

_STATES: Final = ("completed", "discarded", "cancelled")
LONGEST_S: Final = 36_525 * 86_400.0  # 100 years
BATCH: Final = 2_000
_SETTLED_S: Final = 2.0  # what ended so recently may still be uncommitted beside later ones: not removed yet
_SKIP_S: Final = 3_600.0  # where a walk begins that cannot begin at the beginning: so long before its age

_READ: Final = """
select queue, completed_s::text, discarded_s::text, cancelled_s::text from {schema}.retention order by queue
"""

# Without a setting of its own a queue has no row.
_SET: Final = f"""
with gone as (
    delete from {{schema}}.retention
    where queue = $1::text and coalesce($2::float8, $3::float8, $4::float8) is null
), put as (
    insert into {{schema}}.retention (queue, completed_s, discarded_s, cancelled_s)
    select $1::text, $2::float8, $3::float8, $4::float8
    where coalesce($2::float8, $3::float8, $4::float8) is not null
    on conflict (queue) do update
    set completed_s = excluded.completed_s, discarded_s = excluded.discarded_s,
        cancelled_s = excluded.cancelled_s
), {logged_as(5)}
select id from logged
"""

# $3, $10: where to begin, as a time or as seconds ago. $4: the age; $5: how many rows to look at; $6: how
# many of those that ended at the mark itself were seen and stay: no more than are still there, or later
# rows were stepped over in the place of those that another age's walk or an operator has taken. $7: the
# states that have this age where a queue says nothing of its own; $8, $9: 'state queue' that are an
# exception to it, and that have it.
#
# The lock order is that of the first migration: `finished` by ctid; then the payloads and errors, which
# nobody else writes once a job has ended. A row that somebody else took meanwhile (an operator's retry) is
# not deleted here, and nothing of its job is.
_REMOVE: Final = f"""
with {LED}, seen as materialized (
    select ctid as tid, job_id, finished_at, attempt, state, state || ' ' || queue as place
    from {{schema}}.finished
    where exists (select from led)
      and finished_at >= coalesce(
          $3::timestamptz, statement_timestamp() - $10::float8 * interval '1 second', '0001-01-02')
      and finished_at <= statement_timestamp() - $4::float8 * interval '1 second'
    order by finished_at
    offset least($6::int8, (
        select count(*) from {{schema}}.finished where $6::int8 > 0 and finished_at = $3::timestamptz))
    limit $5::int4
), old as materialized (
    select s.tid, s.job_id, s.finished_at, s.attempt > 1 or s.state <> 'completed' as has_errors, j.job_tid,
           j.unique_key, j.unique_generation
    from seen s left join lateral (
        select ctid as job_tid, unique_key, unique_generation from {{schema}}.job
        where id = s.job_id limit 1) j on true
    where (state = any ($7::text[]) and place <> all ($8::text[])) or place = any ($9::text[])
    order by s.tid
), gone as (
    delete from {{schema}}.finished f using old where f.ctid = old.tid
    returning old.*
), payloads as (
    delete from {{schema}}.job where ctid = any (array(select job_tid from gone))
), errors as (
    delete from {{schema}}.attempt_error where ctid = any (array(
        select e.tid from gone g cross join lateral (
            select ctid as tid from {{schema}}.attempt_error where job_id = g.job_id
            order by attempt limit 1000) e
        where g.has_errors))
), last as materialized (
    select max(finished_at) as at from seen
)
select (select count(*) from led), (select count(*) from seen), (select count(*) from gone), last.at,
       (select count(*) from seen where finished_at = last.at)
       - (select count(*) from gone where finished_at = last.at),
       (select pg_catalog.array_agg(unique_key) from gone where unique_generation is not null),
       (select pg_catalog.array_agg(unique_generation) from gone where unique_generation is not null)
from last
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished jobs are kept, with their arguments, results and errors.

    Attributes:
        queue: whose jobs; ``None`` for all queues that say nothing of their own.
        completed, discarded, cancelled: the time after a job's end at which it is removed,
            ``"keep"`` for never, ``None`` for what holds for all queues.
    """

    queue: str | None
    completed: timedelta | Keep | None = None
    discarded: timedelta | Keep | None = None
    cancelled: timedelta | Keep | None = None


DEFAULT: Final = Retention(None, timedelta(hours=24), timedelta(days=7), timedelta(days=7))


def read_retention(schema: str) -> Operation[list[Retention]]:
    """Return what holds for all queues, without gaps, and then each queue's own settings."""
    rows = yield Call(in_schema(_READ, schema))
    own = [Retention(row[0] or None, _age(row[1]), _age(row[2]), _age(row[3])) for row in rows]
    for_all = own.pop(0) if own and own[0].queue is None else DEFAULT
    whole = Retention(
        None,
        _or(for_all.completed, DEFAULT.completed),
        _or(for_all.discarded, DEFAULT.discarded),
        _or(for_all.cancelled, DEFAULT.cancelled),
    )
    return [whole, *own]


def set_retention(
    schema: str, retention: Retention, reason: str = "", by: str | None = None
) -> Operation[None]:
    """Put a queue's settings, or those of all, in the place of what they were.

    Raises:
        ConfigError: an age, the queue's name, ``reason`` or ``by`` cannot be what it is.
    """
    queue = None if retention.queue is None else str(changes({"queue": retention.queue})["queue"])
    ages = {name: _seconds(name, getattr(retention, name)) for name in _STATES}
    target: dict[str, object] = {"queue": queue}
    target |= {name: "keep" if age_s == math.inf else age_s for name, age_s in ages.items()}
    entry = Entry("set retention", target, by, reason)
    yield Call(in_schema(_SET, schema), (queue or "", *ages.values(), *entry.params))


def _seconds(name: str, age: object) -> float | None:
    if age is None:
        return None
    if age == "keep":
        return math.inf
    if not isinstance(age, timedelta) or not 0 <= age.total_seconds() <= LONGEST_S:
        raise ConfigError(
            f"{name}={shown(age)}: a timedelta of 0 to 100 years, 'keep', or None for the default"
        )
    return age.total_seconds()


def _age(text: str | None) -> timedelta | Keep | None:
    if text is None:
        return None
    seconds = float(text)
    return "keep" if seconds > LONGEST_S else timedelta(seconds=seconds)


def _or(age: timedelta | Keep | None, default: timedelta | Keep | None) -> timedelta | Keep | None:
    return default if age is None else age  # not `or`: an age of nothing is an age


class Rule(NamedTuple):
    """What has one age, as a statement is told it. Equal rules walk the same way.

    Attributes:
        age_s: the age.
        states: that have it wherever a queue says nothing of its own.
        exceptions: ``"state queue"`` where a queue says something else.
        own: ``"state queue"`` where a queue says this.
    """

    age_s: float
    states: tuple[str, ...]
    exceptions: tuple[str, ...]
    own: tuple[str, ...]


def rules(settings: Sequence[Retention]) -> list[Rule]:
    """Return a rule for each distinct age, from what :func:`read_retention` returned."""
    for_all, *queues = settings
    own = {
        f"{state} {one.queue}": seconds
        for one in queues
        for state in _STATES
        if (seconds := _seconds(state, getattr(one, state))) is not None
    }
    general = {state: _seconds(state, getattr(for_all, state)) for state in _STATES}
    ages = sorted({age for age in (*own.values(), *general.values()) if age is not None and age != math.inf})
    return [
        Rule(
            age,
            states := tuple(state for state in _STATES if general[state] == age),
            tuple(place for place in own if place.split(" ", 1)[0] in states),
            tuple(place for place, seconds in own.items() if seconds == age),
        )
        for age in ages
    ]


@dataclass(frozen=True, slots=True)
class Walk:
    """How far the removal for one rule has come.

    Attributes:
        rule: what is removed.
        mark: when the last row that was looked at had ended; ``None`` before the first.
        stay: how many that ended at just that moment were looked at and stay.
        skips: whether it begins an hour before its age, for want of a better mark.
    """

    rule: Rule
    mark: datetime | None = None
    stay: int = 0
    skips: bool = False

    def skipping(self) -> Walk:
        """Return the walk that begins near its end: the way there was too long for one statement."""
        return replace(self, mark=None, stay=0, skips=True)

    def anew(self) -> Walk:
        """Return the walk that begins at the beginning."""
        return Walk(self.rule)


class Removed(NamedTuple):
    """What one statement removed.

    Attributes:
        jobs: how many jobs.
        is_full: whether it looked at as many rows as it might, so that more may be waiting.
        walk: where the next one goes on.
    """

    jobs: int
    is_full: bool
    walk: Walk


def remove_finished(schema: str, term: Term, walk: Walk, limit: int = BATCH) -> Operation[Removed]:
    """Look at up to ``limit`` jobs that have reached an age, and remove those whose age it is.

    Raises:
        Deposed: the term is over.
    """
    rule = walk.rule
    age_s = max(rule.age_s, _SETTLED_S)
    arrays = [array_literal(names) for names in (rule.states, rule.exceptions, rule.own)]
    begin_s = age_s + _SKIP_S if walk.skips else None
    rows = yield Call(
        in_schema(_REMOVE, schema),
        (*term, walk.mark, age_s, limit, walk.stay, *arrays, begin_s),
    )
    led, seen, jobs, last, stay, keys, generations = rows[0]
    if not led:
        raise Deposed(f"term {term.number} is over")
    if not seen:
        return Removed(0, is_full=False, walk=walk)
    stay += walk.stay if last == walk.mark else 0
    if keys:
        yield from forget_keys(schema, term, map(KeyRow, keys, generations))
    return Removed(jobs, seen >= limit, Walk(rule, last, stay))
