"""Hosts under Patroni with etcd: Patroni runs the embedded PostgreSQL's programs, and decides who leads.

Patroni has an environment of its own (`scripts/setup patroni .venvs/patroni`), and etcd comes from
`scripts/get-etcd`; `make chaos` sees to both.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobq._embedded.binaries import find_binaries
from jobq._embedded.cluster import SUPERUSER
from jobq._embedded.folder import give_to
from jobq._embedded.pidfile import children_of, read_pid_file
from jobq._embedded.process import Identity, Process, choose_identity, spawn_server
from tests.support.polling import eventually
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_ROOT: Final = Path(__file__).parents[2]
_PATRONI: Final = _ROOT / ".venvs" / "patroni" / "bin" / "python"
_UNPACKED: Final = _ROOT / ".db" / "etcd" / "usr" / "bin"

TTL_S: Final = 20
"""For how long a leader may be silent before another takes over: the least that Patroni allows."""

POLL_S: Final = 0.1
"""Between two questions to Patroni, which shares the cores with what is tested."""

_NAMES: Final = ("north", "south")
_START_S: Final = 90.0  # initdb or a copy of the other's data, on a busy machine
_ANSWER_S: Final = 30.0  # a switchover is answered when it is done
_LAG_MAX_BYTES: Final = 256 << 20  # a follower that lacks a second of the load may take over all the same
_TAIL: Final = 40  # lines of a log


def find_etcd() -> str | None:
    """Return etcd's path, ``None`` when it is not installed."""
    return shutil.which("etcd", path=os.pathsep.join([os.environ.get("PATH", ""), str(_UNPACKED)]))


def find_patroni() -> str | None:
    """Return the Python that has Patroni, ``None`` when there is none."""
    return str(_PATRONI) if _PATRONI.exists() else None


class Etcd:
    """One etcd, which keeps the leader's lock.

    Args:
        folder: for its data and log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port: Final = free_ports()
        self._peer_port: Final = free_ports()
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, with the data that it had."""
        program = find_etcd()
        assert program is not None, "etcd is not installed"
        clients, peers = (f"http://127.0.0.1:{port}" for port in (self.port, self._peer_port))
        command = [program, "--name", "etcd", "--data-dir", str(self._folder / "etcd")]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"etcd={peers}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = spawn_server(Identity("same"), command, log)
        eventually(self._listens, what="etcd listens")

    def kill(self) -> None:
        """Kill it by SIGKILL; does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Host:
    """One host: a Patroni and the PostgreSQL that it runs.

    Args:
        name: by which Patroni knows it.
        folder: for its data and logs.
        passwords: of the roles, by what Patroni calls them.
        settings: the rest of Patroni's configuration.
    """

    def __init__(self, name: str, folder: Path, passwords: dict[str, str], settings: dict[str, Any]) -> None:
        self.name: Final = name
        self.port: Final = free_ports()
        self._folder = folder / name
        self._passwords = passwords
        self._settings = settings
        self._api_port = free_ports()
        self._binaries = find_binaries()
        self._identity = choose_identity(self._binaries)
        self._process: Process | None = None

    def start(self) -> None:
        """Start Patroni, which sees to its server: makes it, rewinds it, or copies the other's data."""
        python = find_patroni()
        assert python is not None, "Patroni is not installed"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        conf = self._folder / "patroni.yml"
        conf.write_text(json.dumps(self._conf()))  # JSON is YAML
        if self._identity.owner is not None:
            give_to(self._identity.owner, self._folder)
        with self._log.open("ab") as log:
            self._process = spawn_server(self._identity, [python, "-m", "patroni", str(conf)], log)

    def kill(self) -> None:
        """End all of it by SIGKILL, as a host's death would; does nothing when it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        server = read_pid_file(self._data)
        if server is not None and server.alive:
            for pid in (server.pid, *children_of(server.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not server.alive, what=f"the server of {self.name} has ended")

    def freeze(self) -> None:
        """SIGSTOP Patroni; its server goes on."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT Patroni."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} does not run"
        self._process.send_signal(number)

    @property
    def leads(self) -> bool:
        """Whether it says that it holds the leader's lock, and that its server takes writes."""
        return self.ask("GET", "/primary")[0] == http.HTTPStatus.OK

    def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> tuple[int, str]:
        """Ask Patroni's API; return the status, 0 when there is no answer, and what it said."""
        connection = http.client.HTTPConnection("127.0.0.1", self._api_port, timeout=_ANSWER_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        finally:
            connection.close()

    def log_tail(self) -> str:
        """Return the last that Patroni and its server have said."""
        if not self._log.exists():
            return f"{self.name}: was never started"
        return "\n".join([f"{self.name}:", *self._log.read_text(errors="replace").splitlines()[-_TAIL:]])

    @property
    def _log(self) -> Path:
        return self._folder / "patroni.log"

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _conf(self) -> dict[str, Any]:
        api, server = (f"127.0.0.1:{port}" for port in (self._api_port, self.port))
        roles = {"superuser": SUPERUSER, "replication": "replicator"}
        return {
            "name": self.name,
            "restapi": {"listen": api, "connect_address": api},
            "postgresql": {
                "listen": server,
                "connect_address": server,
                "data_dir": str(self._data),
                "bin_dir": str(self._binaries.folder),
                "pgpass": str(self._folder / "pgpass"),
                "authentication": {
                    what: {"username": role, "password": self._passwords[what]}
                    for what, role in roles.items()
                },
                "parameters": {"unix_socket_directories": ""},
                "pg_hba": [f"host {what} all 127.0.0.1/32 scram-sha-256" for what in ("all", "replication")],
                "remove_data_directory_on_rewind_failure": True,
                "remove_data_directory_on_diverged_timelines": True,
            },
            **self._settings,
        }


class PatroniCluster:
    """Two hosts under Patroni, one leading, and the etcd that they agree through.

    Args:
        folder: for everything.
        is_synchronous: whether a commit waits for the standby, and only such a standby takes over.
    """

    def __init__(self, folder: Path, *, is_synchronous: bool) -> None:
        self._is_synchronous = is_synchronous
        self._passwords = {what: secrets.token_urlsafe(24) for what in ("superuser", "replication")}
        self.etcd: Final = Etcd(folder)
        settings = self._settings()
        self.hosts: Final = [Host(name, folder, self._passwords, settings) for name in _NAMES]

    def __enter__(self) -> Self:
        try:
            self.etcd.start()
            for host in self.hosts:
                host.start()
            self.await_whole()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        for host in self.hosts:
            host.kill()
            if error is not None:
                error.add_note(host.log_tail())
        self.etcd.kill()

    def dsn(self, dbname: str) -> str:
        """Return the address that names all hosts, and asks for the one that takes writes."""
        hosts = ",".join(f"127.0.0.1:{host.port}" for host in self.hosts)
        password = self._passwords["superuser"]
        return f"postgresql://{SUPERUSER}:{password}@{hosts}/{dbname}?target_session_attrs=read-write"

    def roles(self) -> tuple[Host, Host]:
        """Return the host that leads, and the one that follows."""
        leader, follower = sorted(self.hosts, key=lambda host: host.leads, reverse=True)
        assert leader.leads, "no host leads"
        return leader, follower

    def await_whole(self) -> None:
        """Wait until one host leads and the other could take over at once."""
        eventually(self._is_whole, _START_S, what="the cluster is whole", interval_s=POLL_S)

    def _is_whole(self) -> bool:
        for host in self.hosts:
            status, said = host.ask("GET", "/cluster")
            if status == http.HTTPStatus.OK:
                members = {(member["role"], member["state"]) for member in json.loads(said)["members"]}
                follower = "sync_standby" if self._is_synchronous else "replica"
                return members == {("leader", "running"), (follower, "streaming")}
        return False

    def _settings(self) -> dict[str, Any]:
        return {
            "scope": "jobq",
            "etcd3": {"hosts": f"127.0.0.1:{self.etcd.port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": 1,
                    "retry_timeout": 3,
                    "maximum_lag_on_failover": _LAG_MAX_BYTES,
                    "synchronous_mode": self._is_synchronous,
                    "postgresql": {"use_pg_rewind": True, "parameters": {"max_connections": 100}},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth-host": "scram-sha-256"}],
            },
        }
