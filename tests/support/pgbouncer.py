"""PgBouncer in transaction mode, as Debian ships it."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from jobq._embedded.cluster import SUPERUSER
from jobq._embedded.process import Identity, spawn_server
from tests.support.polling import eventually
from tests.support.ports import free_ports

if TYPE_CHECKING:
    import subprocess
    from types import TracebackType
    from typing import Self

POOL_SIZE: Final = 4

# where scripts/get-pgbouncer unpacks it for those who may not install packages
_UNPACKED: Final = Path(__file__).parents[2] / ".db" / "pgbouncer"


def find_pgbouncer() -> str | None:
    """Return PgBouncer's path, ``None`` when it is not installed."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", str(_UNPACKED)])
    return shutil.which("pgbouncer", path=places)


class PgBouncer:
    """A PgBouncer before one server: transaction mode, four server connections a database.

    Args:
        server_dsn: any database of the server, by its socket.
        folder: for its files; short, since its socket's path is limited.
        identity: as whom it runs, for it refuses to be root as the server does.
    """

    def __init__(self, server_dsn: str, folder: Path, identity: Identity) -> None:
        program = find_pgbouncer()
        assert program is not None, "pgbouncer is not installed"
        self._program = program
        self._folder = folder
        self._identity = identity
        self._target = conninfo_to_dict(server_dsn)
        self.port: Final = free_ports()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        conf = self._folder / "pgbouncer.ini"
        conf.write_text(self._conf())
        if self._identity.owner is not None:
            os.chown(self._folder, *self._identity.owner)
        with (self._folder / "pgbouncer.log").open("wb") as log:
            self._process = spawn_server(self._identity, [self._program, str(conf)], log)
        eventually(self._answers, what="pgbouncer listens")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def dsn(self, dbname: str) -> str:
        """Return the address of a database of the server through PgBouncer."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/{quote(dbname)}"

    @property
    def log(self) -> str:
        return (self._folder / "pgbouncer.log").read_text(errors="replace")

    def _conf(self) -> str:
        return f"""
[databases]
* = host={self._target["host"]} port={self._target["port"]} user={SUPERUSER}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {POOL_SIZE}
max_client_conn = 1000
"""

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"pgbouncer ended:\n{self.log}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
