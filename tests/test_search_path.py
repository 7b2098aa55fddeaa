"""Whatever stands in the schemas of a search path, jobq's statements call PostgreSQL's own functions.

A name without a schema is looked up by the types that it is called with, in all schemas of the path, and an
exact match in `public` goes before a near one in `pg_catalog`: an operator for a domain, `unnest(text[])`
before `unnest(anyarray)`. So each statement is resolved twice, by a server that prints what it understands:
alone, and beside thousands of functions and operators that fit better wherever something can.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg.pq import ExecStatus

import jobq
from jobq._operation import Call
from jobq._statements.bulk import APPLIES_TO, BulkRun, count_jobs, delete_job, move_job, reschedule_job
from jobq._statements.bulk_sql import Settings, When
from jobq._statements.control import control_sql
from jobq._statements.enqueue import ENQUEUE_MANY
from jobq._statements.enqueue_unique import ENQUEUE_REPLACE, ENQUEUE_UNIQUE
from jobq._statements.filter import WALK, JobFilter, list_jobs
from jobq._statements.insert import insert_sql
from jobq._statements.operator_log import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA: Final = "jobq"
STATEMENT: Final = re.compile(r"\s*(with|select|insert|update|delete)\b")
OPERATORS: Final = re.compile(r":opno (\d+)")
FUNCTIONS: Final = re.compile(r":(?:funcid|aggfnoid|winfnoid) (\d+)")
# The bench and the demonstration work in databases and schemas of their own.
ELSEWHERE: Final = ("jobq._bench", "jobq.demo")

TYPES: Final = (
    "bool", "int2", "int4", "int8", "float8", "numeric", "text", "varchar", "name", '"char"', "timestamptz",
    "timestamp", "interval", "bytea", "tid", "xid", "xid8", "oid", "regclass", "jsonb", "text[]", "int8[]",
    "int2[]", "bytea[]", "timestamptz[]", "bool[]", "jobq.short_name", "jobq.priority",
)  # fmt: skip

# For each operator and function in use: others of its name, each with one type in the place of one of its own
# or of both. Made with a path of its own, or the first would be called to make the next.
ATTACK: Final = """
set search_path = pg_catalog;
create function public.evil(anyelement) returns boolean language sql as 'select true';
do $do$
declare
    kinds constant regtype[] := %(types)s::regtype[];
    f record;
begin
    for f in
        select distinct o.oprname, a.l::regtype, a.r::regtype
        from pg_operator o cross join unnest(kinds) k(t)
        cross join lateral (values (k.t::oid, o.oprright), (o.oprleft, k.t::oid), (k.t, k.t)) a(l, r)
        where o.oid = any (%(operators)s::oid[])
          and not exists (select from pg_operator e
                          where e.oprname = o.oprname and e.oprleft = a.l and e.oprright = a.r)
          and not exists (select from pg_type t where t.oid in (a.l, a.r) and t.typtype = 'p')
    loop
        execute format('create or replace function public.evil(%%s, %%s) returns boolean language sql'
                       ' as ''select true''', f.l, f.r);
        execute format('create operator public.%%s (leftarg = %%s, rightarg = %%s, function = public.evil)',
                       f.oprname, f.l, f.r);
    end loop;
    for f in
        select p.proname, (
            select string_agg(format_type(case when n = at then k.t when t.typtype = 'p' then 'text'::regtype
                                               else x end, null), ', ' order by n)
            from unnest(p.proargtypes) with ordinality a(x, n) join pg_type t on t.oid = x) as args
        from pg_proc p cross join generate_series(1, p.pronargs) at cross join unnest(kinds) k(t)
        where p.oid = any (%(functions)s::oid[])
        union
        select p.proname, 'variadic ' || k.t || '[]' from pg_proc p cross join unnest(kinds) k(t)
        where p.oid = any (%(functions)s::oid[]) and k.t::text not like '%%]'
        union
        select p.proname, 'integer default 0' from pg_proc p where p.oid = any (%(functions)s::oid[])
    loop
        begin
            execute format('create function public.%%I(%%s) returns boolean language sql as ''select true''',
                           f.proname, f.args);
        exception when duplicate_function then null;
        end;
    end loop;
end $do$;
"""

# Of the parameters of an enqueue, from $2 on: the one that is never a list, and two that always are.
NOTIFY: Final = 10
KEYED: Final = (11, 12)

ENQUEUES: Final = (
    "select * from jobq.enqueue('k')",
    "select * from jobq.enqueue('k', '{\"a\": 1}', queue => 'q', priority => 3, max_attempts => 2)",
    "select * from jobq.enqueue('k', run_at => '9000-01-01 00:00Z', expires_at => '9000-01-02 00:00Z')",
    "select * from jobq.enqueue('k', unique_key => 'u', tags => '{a,b}', meta => '{\"m\": 1}')",
    "select * from jobq.enqueue('k', unique_key => 'u', timeout => null)",
)


# -- the statements --------------------------------------------------------------------------------


def texts() -> Iterator[tuple[str, str]]:
    """Yield each statement that stands in a module: as a constant, or written where it is called."""
    for info in pkgutil.walk_packages(jobq.__path__, "jobq."):
        if info.name.startswith(ELSEWHERE) or info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            text = value.decode() if isinstance(value, bytes) else value
            if isinstance(text, str) and STATEMENT.match(text):
                yield f"{info.name}.{name}", text
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            match node:
                case ast.Call(func=ast.Name("Call"), args=[ast.Constant(str() as text), *_]):
                    yield f"{info.name}:{node.lineno}", text
                case _:
                    pass


def composed() -> Iterator[tuple[str, str]]:
    """Yield the statements that are put together for a filter."""
    chooses: dict[str, Any] = {
        "queues": ["q"],
        "kinds": ["k"],
        "tags": ["t"],
        "older_than": timedelta(1),
        "newer_than": timedelta(2),
        "error": "e",
        "worker": 1,
    }
    moments = (When(None, 1.0), When(datetime.now(UTC)))
    for state in WALK:
        for which in ({}, chooses, {**chooses, "ids": [1, 2]}):
            chosen = JobFilter(states=[state], **which)
            yield f"list {chosen}", first_text(list_jobs(SCHEMA, chosen, None, 10))
            yield f"count {chosen}", first_text(count_jobs(SCHEMA, chosen, None, 10))
            for action, states in APPLIES_TO.items():
                for when in moments if state in states else ():
                    settings = Settings(when=when, queue="q", priority=1)
                    run = BulkRun(SCHEMA, action, chosen, Entry(action, {}), settings, 10)
                    for step in ("first", "next"):
                        yield f"{action}, {step} {chosen} {when}", first_text(run.step())
                        run._log_id = 1
    for name, one in (
        ("delete", delete_job(SCHEMA, 1)),
        ("reschedule", reschedule_job(SCHEMA, 1, None, timedelta(1))),
        ("move", move_job(SCHEMA, 1, "q", 1)),
    ):
        yield f"{name} one", first_text(one)
    for name, template, parameters in (
        ("many", ENQUEUE_MANY, 11),
        ("unique", ENQUEUE_UNIQUE, 15),
        ("replace", ENQUEUE_REPLACE, 17),
    ):
        # nothing differs between the jobs, everything does, or one thing of each
        for differs in ((), range(parameters), *((n,) for n in range(parameters))):
            varies = tuple(n in KEYED or (n in differs and n != NOTIFY) for n in range(parameters))
            yield f"enqueue {name}, {differs}", insert_sql(template, SCHEMA, varies)


def first_text(operation: Any) -> str:
    call = next(operation)
    assert isinstance(call, Call)
    return call.sql


def statements() -> dict[str, str]:
    """Return the text of every statement, and where it comes from."""
    found: dict[str, str] = {}
    for name, template in (*texts(), *composed()):
        text = control_sql(template, SCHEMA)
        is_part = re.search(r"\{[a-z_]+\}", text)
        if not is_part and "<id>" not in text:  # that one is advice for people
            found.setdefault(text, name)
    return found


# -- what the server understands -------------------------------------------------------------------


class Reader:
    """A session whose server prints what it understands."""

    def __init__(self, dsn: str) -> None:
        settings = "-csearch_path=public -cdebug_print_parse=on -cclient_min_messages=log"
        self.connection = psycopg.connect(dsn, options=settings, autocommit=True)
        self._printed: list[str] = []
        self.connection.add_notice_handler(lambda notice: self._printed.append(notice.message_detail or ""))

    def understood(self, text: str) -> str:
        """Return the tree of a statement, which is not run; or why there is none."""
        self._printed.clear()
        result = self.connection.pgconn.prepare(b"", text.encode())
        if result.status != ExecStatus.COMMAND_OK:
            return result.error_message.decode()
        assert self._printed
        return "".join(self._printed)

    def understood_within(self, text: str) -> str:
        """Run a statement; return the trees of it and of all that the functions in it do."""
        self._printed.clear()
        self.connection.execute(text.encode())
        return "".join(self._printed)


def read(dsn: str, all_texts: Iterable[str]) -> dict[str, str]:
    reader = Reader(dsn)
    with reader.connection:
        return {text: reader.understood(text) for text in all_texts}


def read_enqueues(dsn: str) -> list[str]:
    reader = Reader(dsn)
    with reader.connection:
        return [reader.understood_within(text) for text in ENQUEUES]


def attack(db: psycopg.Connection, trees: Iterable[str]) -> None:
    """Create what could take the place of the functions and operators in some trees."""
    all_trees = "".join(trees)
    found = {
        "types": list(TYPES),
        "operators": [int(oid) for oid in set(OPERATORS.findall(all_trees))],
        "functions": [int(oid) for oid in set(FUNCTIONS.findall(all_trees))],
    }
    with psycopg.ClientCursor(db) as cursor:
        cursor.execute(ATTACK, found)


@pytest.mark.matrix
def test_every_statement_means_the_same_beside_functions_and_operators_of_strangers(
    dsn: str, db: psycopg.Connection
) -> None:
    names = statements()
    assert len(names) > 200
    before = read(dsn, names)
    broken = {names[text]: tree for text, tree in before.items() if tree.startswith("ERROR")}
    assert broken == {}
    attack(db, before.values())
    after = read(dsn, names)
    assert [names[text] for text in names if after[text] != before[text]] == []


@pytest.mark.matrix
def test_the_sql_function_does_the_same_beside_functions_and_operators_of_strangers(
    dsn: str, db: psycopg.Connection
) -> None:
    before = read_enqueues(dsn)
    db.execute("truncate jobq.unique_key")
    attack(db, before)
    assert read_enqueues(dsn) == before


@pytest.mark.parametrize(
    "text",
    [
        "select from jobq.ready where queue = 'q'",
        "select from jobq.ready where priority = $1::int2",
        "select unnest($1::text[])",
        "select count($1::text)",
        "select nextval('jobq.job_id_seq')",
        "select format('%s', $1::int8)",
        "select 0.5 + $1::float8",
        "select 'a' || $1::int8",
        "select $1::text[] @> $2::text[]",
    ],
)
def test_the_attack_finds_what_is_not_exact(dsn: str, db: psycopg.Connection, text: str) -> None:
    before = read(dsn, [text])
    attack(db, before.values())
    assert read(dsn, [text]) != before
