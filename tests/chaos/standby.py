"""A primary and its standby, made by pg_basebackup; the primary dies, and the standby takes over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from jobq._clients.migrate import migrate
from jobq._embedded.binaries import find_binaries
from jobq._embedded.process import choose_identity, run_program
from jobq.embedded import Databases, EmbeddedPostgres
from tests.support.polling import eventually

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

    from tests.chaos.stage import Stage

DATABASE: Final = "app"
_NAME: Final = "standby"


class Pair:
    """Two servers, the second a standby of the first.

    Args:
        stack: ends them.
        folder: for the standby's data.
        is_synchronous: whether a commit waits for the standby.
    """

    def __init__(self, stack: contextlib.ExitStack, folder: Path, *, is_synchronous: bool) -> None:
        self.is_synchronous = is_synchronous
        self.primary = stack.enter_context(EmbeddedPostgres(settings={"wal_keep_size": "256MB"}))
        with Databases(self.primary.dsn()) as databases:
            databases.create(DATABASE)
        migrate(self.primary.dsn(DATABASE))
        home = folder / "standby"
        home.mkdir()
        _copy(self.primary.dsn(), home / "data")
        self.standby = stack.enter_context(
            EmbeddedPostgres(home, settings={"cluster_name": _NAME, "wal_retrieve_retry_interval": "100ms"})
        )
        if is_synchronous:
            self._sql(self.primary, f"alter system set synchronous_standby_names = '{_NAME}'")
            self._sql(self.primary, "select pg_reload_conf()")
        wanted = "sync" if is_synchronous else "async"
        eventually(
            lambda: self._sql(self.primary, "select sync_state from pg_stat_replication") == [(wanted,)],
            30.0,
            what=f"the standby is {wanted}",
        )

    @property
    def dsn(self) -> str:
        """The address that names both servers, and asks for the one that takes writes."""
        ways = [conninfo_to_dict(server.dsn(DATABASE)) for server in (self.primary, self.standby)]
        return make_conninfo(
            host=",".join(str(way["host"]) for way in ways),
            port=",".join(str(way["port"]) for way in ways),
            user=ways[0]["user"],
            dbname=DATABASE,
            target_session_attrs="read-write",
        )

    def fail_over(self, stage: Stage) -> None:
        """Kill the primary under load and promote the standby, which may lack the last commits."""
        stage.pause(1.0, 2.0)
        if not self.is_synchronous:
            self._sql(self.standby, "alter system set primary_conninfo = ''")
            self._sql(self.standby, "select pg_reload_conf()")
            eventually(
                lambda: self._sql(self.primary, "select from pg_stat_replication") == [], what="cut off"
            )
            time.sleep(1.0)  # what happens now is lost
        began = time.monotonic()
        self.primary.kill()
        assert self._sql(self.standby, "select pg_promote(true, 60)") == [(True,)]
        stage.await_answers()
        stage.note_longest("s until the standby took writes", time.monotonic() - began)
        stage.count("failovers")
        stage.pause(1e9, 1e9)

    @staticmethod
    def _sql(server: EmbeddedPostgres, text: str) -> list[tuple[object, ...]]:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []


def _copy(dsn: str, data: Path) -> None:
    binaries = find_binaries()
    way = conninfo_to_dict(dsn)
    source = make_conninfo(host=way["host"], port=way["port"], user=way["user"])
    command = [binaries.program("pg_basebackup"), "--pgdata", str(data), "--dbname", source]
    run_program(choose_identity(binaries), [*command, "--write-recovery-conf", "--checkpoint=fast"])
