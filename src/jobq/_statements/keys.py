"""Removing what nothing needs any more of the keys' rows (see `enqueue_unique`). Only the leader does.

A row is stale when its job is gone, or holds its key under a later generation, and no period holds it. It
goes, but so that nobody whose snapshot is older gets its number while a later one holds the key:

* whoever counts from the row itself has it locked, and then it stays; or finds it gone, and looks again;
* whoever counts from the row before it would get its number. So that row is locked, too, and made another,
  which he does not find either;
* whoever sees no row begins with the first number. So a key's first row stays while there is another.

Whether there is a later row is asked by a statement that begins when the rows are locked: then nobody can
add one, and its snapshot shows all that were added before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._operation import Call, Operation, in_schema
from jobq._statements.leader import Term, led

if TYPE_CHECKING:
    from collections.abc import Iterable

BITE: Final = 1_000  # rows that one look takes in

# All keys are walked in their order, from a place ($1, $2) that the caller keeps.
_LOOK: Final = """
with seen as materialized (
    select key, generation, job_id, held_until from {schema}.unique_key
    where (key, generation) > ($1::bytea, $2::int4)
    order by key, generation limit $3::int4
)
select key, generation, coalesce(held_until, '-infinity') <= statement_timestamp() and coalesce(
    (select unique_generation is not null and unique_generation <> s.generation
     from {schema}.job where id = s.job_id limit 1), true)
from seen s order by key, generation
"""

LOCK: Final = """
with stale as materialized (
    select u.key, u.generation, u.tid, b.tid as before_tid
    from unnest($1::bytea[], $2::int4[]) k(key, generation)
    cross join lateral (
        select ctid as tid, * from {schema}.unique_key u
        where u.key = k.key and u.generation = k.generation limit 1) u
    left join lateral (
        select ctid as tid from {schema}.unique_key u
        where u.key = k.key and u.generation < k.generation order by generation desc limit 1) b on true
    where coalesce(u.held_until, '-infinity') <= statement_timestamp()
    order by key, generation
)
select key, generation from stale
cross join lateral (select from {schema}.unique_key where ctid = tid for update skip locked) own
left join lateral (
    select 1 as locked from {schema}.unique_key where ctid = before_tid for update skip locked) b on true
where before_tid is null or b.locked = 1
"""

FORGET: Final = """
with stale as materialized (
    select u.tid, b.tid as before_tid, coalesce(a.is_there, false) as has_later
    from unnest($1::bytea[], $2::int4[]) k(key, generation)
    cross join lateral (
        select ctid as tid from {schema}.unique_key u
        where u.key = k.key and u.generation = k.generation limit 1) u
    left join lateral (
        select ctid as tid from {schema}.unique_key u
        where u.key = k.key and u.generation < k.generation order by generation desc limit 1) b on true
    left join lateral (
        select true as is_there from {schema}.unique_key u
        where u.key = k.key and u.generation > k.generation order by generation limit 1) a on true
), going as materialized (
    select * from stale where before_tid is not null or not has_later
), forgotten as (
    delete from {schema}.unique_key where ctid = any (array(select tid from going))
    returning 1
), renewed as (
    delete from {schema}.unique_key where ctid = any (array(
        select before_tid from going where has_later and before_tid not in (select tid from going)))
    returning *
), again as (
    insert into {schema}.unique_key (key, generation, job_id, held_until, until_started)
    select key, generation, job_id, held_until, until_started from renewed
)
select count(*) from forgotten
"""


class KeyRow(NamedTuple):
    """A row of a key, and how far the keys have been walked."""

    key: bytes
    generation: int


FIRST_KEY: Final = KeyRow(b"", 0)


def look_at_keys(schema: str, place: KeyRow) -> Operation[tuple[list[KeyRow], KeyRow]]:
    """Look at the next :data:`BITE` rows of unique keys.

    Args:
        schema: where.
        place: what the last call returned, or `FIRST_KEY`.

    Returns:
        Those that nothing needs, and where to go on: `FIRST_KEY` when all have been looked at.
    """
    rows = yield Call(in_schema(_LOOK, schema), (*place, BITE))
    stale = [KeyRow(key, generation) for key, generation, is_stale in rows if is_stale]
    return stale, KeyRow(*rows[-1][:2]) if len(rows) >= BITE else FIRST_KEY


def forget_keys(schema: str, term: Term, stale: Iterable[KeyRow]) -> Operation[int]:
    """Remove rows of which nothing needs any; return how many went. What somebody has locked stays.

    A key's first row goes once it is the only one.

    Raises:
        Deposed: the term is over.
    """
    return (yield from led(schema, term, _forget(schema, stale)))


def _forget(schema: str, stale: Iterable[KeyRow]) -> Operation[int]:
    locked = yield Call(in_schema(LOCK, schema), _columns(stale))
    if not locked:
        return 0
    rows = yield Call(in_schema(FORGET, schema), _columns(map(KeyRow._make, locked)))
    count: int = rows[0][0]
    return count


def _columns(rows: Iterable[KeyRow]) -> tuple[list[bytes], list[int]]:
    known = list(rows)
    return [row.key for row in known], [row.generation for row in known]
