"""Fixtures of the whole suite: servers, a database for each test, processes, bad networks.

Each xdist worker has a server of its own: 0.35 s, and no waiting for each other's locks.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg.conninfo import conninfo_to_dict

from jobq._clients.migrate import migrate
from jobq._embedded.binaries import find_binaries
from jobq._embedded.process import choose_identity
from jobq.embedded import THROWAWAY_SETTINGS, Databases, EmbeddedPostgres
from tests.support.pgbouncer import PgBouncer, find_pgbouncer
from tests.support.processes import PythonProcess
from tests.support.proxy import TcpProxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytest_plugins = ["tests.support.skips"]

APP_DATABASE = "app"
"""The migrated database of a `durable_server`."""

# A busy machine makes examples slow, and proves nothing by it.
settings.register_profile("jobq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jobq")

_TWO_PHASE = {"max_prepared_transactions": "20"}


class DurableServer(Protocol):
    def __call__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        bin_dir: Path | None = None,
    ) -> EmbeddedPostgres: ...


class SpawnPython(Protocol):
    def __call__(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
    ) -> PythonProcess: ...


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """The session's server, in memory, with a TCP port too; not to be stopped by a test."""
    settings = {**THROWAWAY_SETTINGS, **_TWO_PHASE}
    with EmbeddedPostgres(settings=settings, port=0, in_memory=True) as running:
        yield running


@pytest.fixture(scope="session")
def databases(server: EmbeddedPostgres) -> Iterator[Databases]:
    """Creates and drops databases on the session's server."""
    with Databases(server.dsn()) as databases:
        yield databases


@pytest.fixture(scope="session")
def template(server: EmbeddedPostgres, databases: Databases) -> str:
    """The name of a migrated database, to copy."""
    name = databases.create("jobq_template")
    migrate(server.dsn(name))
    return name


@pytest.fixture
def dsn(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[str]:
    """The address of a migrated database that is this test's alone."""
    name = databases.create(template=template)
    yield server.dsn(name)
    databases.drop(name)


@pytest.fixture(scope="module")
def address(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[str]:
    """The address of a migrated database that one file's tests share: a property has hundreds of examples."""
    name = databases.create(template=template)
    yield server.dsn(name)
    databases.drop(name)


@pytest.fixture
def empty_dsn(server: EmbeddedPostgres, databases: Databases) -> Iterator[str]:
    """The address of a database that is this test's alone, with no schema in it."""
    name = databases.create()
    yield server.dsn(name)
    databases.drop(name)


@pytest.fixture
def durable_server() -> Iterator[DurableServer]:
    """Start servers that keep their promises (fsync, on disk), to be restarted or killed at will.

    Each has a migrated database, `APP_DATABASE`.
    """
    stack = contextlib.ExitStack()

    def start(
        *, settings: Mapping[str, str] | None = None, port: int | None = None, bin_dir: Path | None = None
    ) -> EmbeddedPostgres:
        server = EmbeddedPostgres(bin_dir=bin_dir, settings={**_TWO_PHASE, **(settings or {})}, port=port)
        stack.enter_context(server)
        with Databases(server.dsn()) as databases:
            databases.create(APP_DATABASE)
        migrate(server.dsn(APP_DATABASE))
        return server

    with stack:
        yield start


@pytest.fixture
def spawn_python() -> Iterator[SpawnPython]:
    """Start Python processes that are killed, with all they started, when the test ends."""
    stack = contextlib.ExitStack()

    def spawn(
        *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
    ) -> PythonProcess:
        process = PythonProcess(*arguments, env=env, cwd=cwd)
        stack.callback(process.end)
        return process

    with stack:
        yield spawn


@pytest.fixture
def proxy(dsn: str) -> Iterator[TcpProxy]:
    """A network in front of the test's database that fails when told to; connect to ``proxy.dsn``."""
    with TcpProxy(dsn) as running:
        yield running


@pytest.fixture
def pgbouncer(server: EmbeddedPostgres) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode before the session's server."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed")
    identity = choose_identity(find_binaries())
    with (
        tempfile.TemporaryDirectory(prefix="jobq-") as folder,
        PgBouncer(server.dsn(), Path(folder), identity) as running,
    ):
        yield running


@pytest.fixture
def pooled_dsn(pgbouncer: PgBouncer, dsn: str) -> str:
    """The test's own database, through PgBouncer in transaction mode; ``dsn`` is the direct way."""
    return pgbouncer.dsn(str(conninfo_to_dict(dsn)["dbname"]))


@pytest.fixture
def db(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of the test's own to its database, in autocommit."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection
