"""The operator log: who did what, when, why, and to how many jobs.

An entry is written by the statement that does the thing, or in its transaction, so that there is
neither an action without an entry nor an entry without its action. Most statements embed the
insert as a CTE (:func:`logged_as`); what has several statements logs with one of its own
(:func:`log_action`) inside :func:`jobq._operation.atomic`.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq._errors import ConfigError
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_REASON: Final = 1_000  # characters
MAX_ACTOR: Final = 200
MAX_LISTED: Final = 1_000  # entries of one call

_ENTRIES: Final = """
select id, to_char(at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'), actor, action,
       target::text, jobs, reason
from {schema}.operator_log where id < $1::int8"""
_NEWEST: Final = " order by id desc limit $2::int4"
_READ: Final = _ENTRIES + _NEWEST
_READ_OF_JOB: Final = f"{_ENTRIES} and target operator(pg_catalog.@>) $3::jsonb{_NEWEST}"


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """One entry of the operator log.

    Attributes:
        id: grows with time; pages are asked for with ``before=``.
        at: when, by the database's clock.
        actor: who said it: the ``by=`` of the call, else user and host of the process.
        action: what was done, such as ``cancel`` or ``pause``.
        target: to what: a job's id, a queue, a filter.
        jobs: how many jobs it changed, ``None`` where it is not about jobs.
        reason: why, where it was said.
    """

    id: int
    at: datetime
    actor: str
    action: str
    target: Mapping[str, object]
    jobs: int | None
    reason: str | None


class Entry(NamedTuple):
    """What an operation asks to have logged.

    Attributes:
        action: a word or two, in lower case.
        target: what it is about, as JSON.
        by: who does it; ``None`` for the process's user and host.
        reason: why, "" for nothing said.
    """

    action: str
    target: Mapping[str, object]
    by: str | None = None
    reason: str = ""

    @property
    def params(self) -> tuple[str, str, str, str]:
        """The four parameters of :func:`logged_as`.

        Raises:
            ConfigError: ``by`` or ``reason`` cannot be kept.
        """
        actor = default_actor() if self.by is None else check_text("by", self.by, MAX_ACTOR)
        if not actor:
            raise ConfigError("by='': who does it; leave it out for the process's user and host")
        return actor, self.action, json.dumps(self.target), check_text("reason", self.reason, MAX_REASON)


def logged_as(first: int, *, jobs: str = "null", where: str = "true") -> str:
    """Return the CTE ``logged``, which writes an entry and returns its id.

    Args:
        first: number of the first of its four parameters, :attr:`Entry.params`.
        jobs: SQL of how many jobs were changed, such as ``(select count(*) from x)``.
        where: SQL of whether there is anything to log.
    """
    actor, action, target, reason = (f"${first + n}::text" for n in range(4))
    return f"""logged as (
    insert into {{schema}}.operator_log (at, actor, action, target, jobs, reason)
    select statement_timestamp(), {actor}, {action}, {target}::jsonb, {jobs}, nullif({reason}, '')
    where {where}
    returning id
)"""


_LOG: Final = f"with {logged_as(1, jobs='$5::int8')} select id from logged"


def log_action(schema: str, entry: Entry, jobs: int | None = None) -> Operation[int]:
    """Write an entry with a statement of its own; returns its id. For use within a transaction."""
    rows = yield Call(in_schema(_LOG, schema), (*entry.params, jobs))
    return int(rows[0][0])


def read_log(
    schema: str, limit: int, before: int | None, job_id: int | None
) -> Operation[list[OperatorAction]]:
    """Return entries, the newest first.

    Raises:
        ConfigError: ``limit`` is not from 1 to 1,000, or ``before`` or ``job_id`` is no id.
    """
    limit = _integer("limit", limit)
    if not 1 <= limit <= MAX_LISTED:
        raise ConfigError(f"limit={shown(limit)}: 1 to {MAX_LISTED:,}")
    newest = 2**63 - 1 if before is None else min(_integer("before", before), 2**63 - 1)
    params = (max(newest, 0), limit)
    if job_id is None:
        rows = yield Call(in_schema(_READ, schema), params)
    else:
        target = json.dumps({"job": max(-1, min(_integer("job_id", job_id), 2**63 - 1))})
        rows = yield Call(in_schema(_READ_OF_JOB, schema), (*params, target))
    return [_action(*row) for row in rows]


def _action(
    id_: int, at: str, actor: str, action: str, target: str, jobs: int | None, reason: str | None
) -> OperatorAction:
    return OperatorAction(id_, datetime.fromisoformat(at), actor, action, json.loads(target), jobs, reason)


@functools.cache
def default_actor() -> str:
    """Return who acts when nobody says: the process's user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}".encode("utf-8", "backslashreplace").decode()[:MAX_ACTOR]


def check_text(name: str, value: object, limit: int) -> str:
    """Return a text that PostgreSQL can keep, of at most ``limit`` characters.

    Raises:
        ConfigError: it is none; the message names it.
    """
    text = str.__str__(value) if isinstance(value, str) else None
    if text is None or len(text) > limit or "\0" in text:
        raise ConfigError(f"{name}: a text of at most {limit:,} characters without NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: a lone surrogate is no text") from None
    return text


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: an integer")
    return int(value)
