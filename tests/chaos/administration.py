"""What administrators change under load and take back: rights, settings, limits, locks."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.stage import Stage

ROLE: Final = "chaos_app"  # as whom workers and producers connect


class Change(NamedTuple):
    """One change and its undoing, as statements."""

    name: str
    do: str
    undo: str


def _settings(name: str, **values: str) -> Change:
    return Change(
        name,
        "; ".join(f"alter role {ROLE} set {setting} = '{value}'" for setting, value in values.items()),
        "; ".join(f"alter role {ROLE} reset {setting}" for setting in values),
    )


def _right(right: str, table: str) -> Change:
    return Change(
        f"no {right} on {table}",
        f"revoke {right} on jobq.{table} from {ROLE}",
        f"grant {right} on jobq.{table} to {ROLE}",
    )


CHANGES: Final = (
    _settings("read only", default_transaction_read_only="on"),
    _right("delete", "running"),
    _settings("serializable", default_transaction_isolation="serializable"),
    _right("insert", "finished"),
    _settings("statement timeout", statement_timeout="20ms"),
    _right("update", "worker"),
    _settings("lock timeout", lock_timeout="1ms"),
    _right("select", "job"),
    _settings("idle limits", idle_in_transaction_session_timeout="50ms", idle_session_timeout="200ms"),
    Change("no schema", f"revoke usage on schema jobq from {ROLE}", f"grant usage on schema jobq to {ROLE}"),
    _settings("search path", search_path="pg_temp"),
    Change(
        "few connections", f"alter role {ROLE} connection limit 5", f"alter role {ROLE} connection limit -1"
    ),
    _settings(
        "output",
        datestyle="German, DMY",
        intervalstyle="sql_standard",
        bytea_output="escape",
        timezone="Asia/Kathmandu",
        extra_float_digits="-10",
    ),
    Change("no login", f"alter role {ROLE} nologin", f"alter role {ROLE} login"),
    _settings("planner", enable_indexscan="off", enable_nestloop="off", enable_tidscan="off"),
)

_END: Final = f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{ROLE}'"
# Without their reconnecting nothing is changed for the application's own sessions; jobq's workers have names
# with a space in them, and must find back by themselves.
_END_PRODUCERS: Final = f"{_END} and application_name not like 'jobq %%'"


def make_role(dsn: str) -> None:
    """Make the role, with all rights that workers and producers need."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create role {ROLE} login".encode())
        connection.execute(f"grant usage on schema jobq to {ROLE}".encode())
        for objects in ("tables", "sequences", "functions"):
            connection.execute(f"grant all on all {objects} in schema jobq to {ROLE}".encode())


def change_and_take_back(stage: Stage) -> None:
    """Make each change under load, let sessions meet it, take it back, and wait until work goes on."""
    for number, change in enumerate(itertools.cycle(CHANGES)):
        if number >= len(CHANGES) and stage.is_over():
            return
        for statement in change.do.split("; "):
            stage.sql(statement)
        stage.sql(_END)
        time.sleep(stage.rng.uniform(0.4, 0.8))
        for statement in change.undo.split("; "):
            stage.sql(statement)
        stage.sql(_END_PRODUCERS)
        stage.await_work(after=change.name)
        stage.count("changes")


def lock_tables(stage: Stage) -> None:
    """Lock one hot table after the other as ALTER TABLE does."""
    for table in itertools.cycle(
        ("running", "ready", "finished", "scheduled", "worker", "job", "unique_key")
    ):
        stage.pause(0.3, 0.8)
        if stage.is_over():
            return
        with psycopg.connect(stage.dsn) as connection:
            connection.execute(f"lock table jobq.{table} in access exclusive mode".encode())
            stage.pause(1.0, 5.0 if stage.is_long else 2.0)
            stage.count("tables locked")


def keep_transactions_open(*, commit: bool) -> Callable[[Stage], None]:
    """Keep a reader, a writer and a prepared transaction open all the while.

    Args:
        commit: whether the jobs that were written in them come to exist at the end, or never.
    """

    def fault(stage: Stage) -> None:
        with (
            psycopg.connect(stage.dsn) as reader,
            psycopg.connect(stage.dsn) as writer,
            psycopg.connect(stage.dsn) as preparer,
        ):
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("select count(*) from jobq.ready")
            jobs = {**stage.make_in(writer, 20), **stage.make_in(preparer, 20)}
            preparer.execute("prepare transaction 'chaos'")
            preparer.rollback()  # psycopg's own view of it; the server knows of none
            preparer.autocommit = True
            stage.pause(1e9, 1e9)
            verb = "commit" if commit else "rollback"
            writer.execute(verb.encode())
            preparer.execute(f"{verb} prepared 'chaos'".encode())
            stage.note_decided(jobs, made=commit)
            stage.count("transactions left open", 3)

    return fault
