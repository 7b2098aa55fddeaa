"""Making and dropping databases by the dozen, for tests."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, LiteralString

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class Databases:
    """Creates and drops databases of one server, through one connection that it keeps.

    Args:
        admin_dsn: a database of the server (not one to be copied), as a role that may CREATEDB.
    """

    def __init__(self, admin_dsn: str) -> None:
        self._admin = psycopg.connect(admin_dsn, autocommit=True)

    def create(self, name: str | None = None, *, template: str | None = None) -> str:
        """Create a database and return its name.

        Args:
            name: ``None`` makes one up.
            template: the database to copy, to which nobody may be connected.
        """
        name = name or f"jobq_{secrets.token_hex(6)}"
        statement = "create database {name}"
        if template is not None:
            statement += " template {template}"
            # from 15 on the default copies through WAL, for the sake of large shared_buffers: 3x slower
            if self._admin.info.server_version >= 150_000:
                statement += " strategy file_copy"
        self._run(statement, name=name, template=template or "")
        return name

    def drop(self, name: str) -> None:
        """Drop a database if it is there, ending whatever is connected to it."""
        self._run("drop database if exists {name} with (force)", name=name)

    def close(self) -> None:
        """Close the connection; the databases stay."""
        self._admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, statement: LiteralString, **names: str) -> None:
        identifiers = {key: sql.Identifier(name) for key, name in names.items()}
        self._admin.execute(sql.SQL(statement).format(**identifiers))
