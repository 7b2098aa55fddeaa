"""Which fields are hidden in output: written by workers for their kinds, and by operators; and how they are.

Whoever looks at jobs has not the application at hand, so what it declares is kept beside the jobs. It stays
when no worker declares it any more, for its jobs may stay, too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from jobq._errors import ConfigError
from jobq._kinds.options import check_kind
from jobq._kinds.unique import UNIQUE_NAME_LENGTH
from jobq._operation import Call, Operation, in_schema
from jobq._redaction import Redaction, Secrets, check_fields
from jobq._statements.operator_log import Entry, logged_as

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jobq._statements.periodic_operate import PeriodicInfo
    from jobq._types import AttemptError, JobInfo

_READ: Final = "select nullif(kind, ''), field from {schema}.redaction order by kind, field"

_DECLARE: Final = """
insert into {schema}.redaction (kind, field)
select kind, field from unnest($1::text[], $2::text[]) d(kind, field) order by kind, field
on conflict do nothing
"""

_ADD: Final = f"""
with x as (
    insert into {{schema}}.redaction (kind, field)
    select $1::text, field from pg_catalog.unnest($2::text[]) field order by field
    on conflict do nothing
    returning field
), {logged_as(3, where="exists (select from x)")}
select field, (select id from logged) from x order by field
"""

_REMOVE: Final = f"""
with x as (
    delete from {{schema}}.redaction where kind = $1::text and field = any ($2::text[]) returning field
), {logged_as(3, where="exists (select from x)")}
select field, (select id from logged) from x order by field
"""


@dataclass(frozen=True, slots=True)
class RedactedField:
    """A field that is hidden in output, beside those whose names tell by themselves what they hold.

    Attributes:
        kind: of whose jobs; ``None`` for all kinds.
        field: its name.
    """

    kind: str | None
    field: str


class Redactions:
    """What is hidden of jobs when they are shown: reached as ``client.redaction.load()``."""

    def __init__(self, fields: Iterable[RedactedField]) -> None:
        by_kind: defaultdict[str | None, list[str]] = defaultdict(list)
        for one in fields:
            by_kind[one.kind].append(one.field)
        self._of_all = by_kind.pop(None, [])
        self._others = Redaction(self._of_all)
        self._by_kind = {kind: Redaction([*self._of_all, *names]) for kind, names in by_kind.items()}

    def job(self, info: JobInfo) -> JobInfo:
        """Return a job as it may be shown."""
        redaction, secrets = self._of(info.kind), self._secrets(info)
        meta = redaction.document(info.meta)
        key = info.unique_key
        if key is not None:
            key = secrets.out_of(key, is_cut=len(key) >= UNIQUE_NAME_LENGTH)
        return structs.replace(
            info,
            args=redaction.document(info.args),
            meta=meta if isinstance(meta, dict) else {},
            result=redaction.document(info.result),
            unique_key=key,
            reason=None if info.reason is None else secrets.out_of(info.reason),
        )

    def errors(self, info: JobInfo, errors: Sequence[AttemptError]) -> list[AttemptError]:
        """Return a job's errors as they may be shown; ``info`` is the job as it is, not as it is shown."""
        secrets = self._secrets(info)
        return [
            structs.replace(
                error, message=secrets.out_of(error.message), traceback=secrets.out_of(error.traceback)
            )
            for error in errors
        ]

    def schedule(self, info: PeriodicInfo) -> PeriodicInfo:
        """Return a schedule as it may be shown."""
        return replace(info, args=self._of(info.kind).document(info.args))

    def _of(self, kind: str) -> Redaction:
        return self._by_kind.get(kind, self._others)

    def _secrets(self, info: JobInfo) -> Secrets:
        return Secrets(self._of(info.kind), lambda: (info.args, dict(info.meta), info.result))


def declare_redaction(schema: str, declared: Mapping[str, Sequence[str]]) -> Operation[None]:
    """Write what a worker's kinds declare: the fields of each."""
    rows = [(kind, field) for kind, fields in declared.items() for field in fields]
    if rows:
        kinds, fields = zip(*rows, strict=True)
        yield Call(in_schema(_DECLARE, schema), (list(kinds), list(fields)))


def read_redaction(schema: str) -> Operation[list[RedactedField]]:
    """Return every field that is hidden, those of all kinds first."""
    return [RedactedField(kind, field) for kind, field in (yield Call(in_schema(_READ, schema)))]


def add_redaction(
    schema: str, fields: Sequence[str], kind: str | None, reason: str = "", by: str | None = None
) -> Operation[list[str]]:
    """Hide fields of a kind's jobs, or of all jobs. Returns those that were not hidden yet.

    Raises:
        ConfigError: a name cannot be what it is, or there is none; or the reason cannot be kept.
    """
    return (yield from _change(_ADD, "redact", schema, fields, kind, reason, by))


def remove_redaction(
    schema: str, fields: Sequence[str], kind: str | None, reason: str = "", by: str | None = None
) -> Operation[list[str]]:
    """Hide fields no longer, where `add_redaction` or a worker said so. Returns those that were hidden."""
    return (yield from _change(_REMOVE, "stop redacting", schema, fields, kind, reason, by))


def _change(
    sql: str, action: str, schema: str, fields: Sequence[str], kind: str | None, reason: str, by: str | None
) -> Operation[list[str]]:
    names = check_fields(fields)
    if not names:
        raise ConfigError(f"{action}: give the name of a field, or several")
    target = {"fields": list(names), **({} if kind is None else {"kind": check_kind(kind)})}
    params = (kind or "", list(names), *Entry(action, target, by, reason).params)
    rows = yield Call(in_schema(sql, schema), params)
    return [row[0] for row in rows]
