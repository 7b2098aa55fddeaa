"""`jobqctl`: what it answers, and with which exit code."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

import jobq
from jobq import cli
from jobq._clients.migrate import migration_script
from jobq.cli.app import app
from jobq.cli.application import ApplicationError, load_jobs
from jobq.cli.settings import ProcessSettings
from tests.support.polling import eventually

if TYPE_CHECKING:
    import psycopg
    from click.testing import Result

    from tests.conftest import SpawnPython
    from tests.support.processes import PythonProcess

NOWHERE = "postgresql://127.0.0.1:1/none"


def run(*arguments: str, dsn: str | None = None) -> Result:
    """Run it in this process, with nothing in the environment but the given DATABASE_URL."""
    return CliRunner().invoke(app, arguments, env={"DATABASE_URL": dsn, "COLUMNS": "200"})


@pytest.mark.parametrize("command", [(), ("migrate",), ("worker",), ("demo",)])
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_option_of_every_command_has_a_help_text() -> None:
    for command in app.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help or isinstance(parameter.type, click.Choice), (
                    command.name,
                    parameter.name,
                )


def test_it_says_its_version() -> None:
    assert run("--version").output.strip() == f"jobqctl, version {jobq.__version__}"


def test_without_its_libraries_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("jobq.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "jobqctl needs click: pip install 'jobq[cli]'\n"


# migrate


def test_migrate_brings_an_empty_database_up_to_date_and_then_has_nothing_to_do(empty_dsn: str) -> None:
    pending = run("migrate", "--check", dsn=empty_dsn)
    assert pending.exit_code == 3
    assert "pending: 0001_" in pending.output
    assert "jobqctl migrate" in pending.output
    first = run("migrate", dsn=empty_dsn)
    assert first.exit_code == 0
    assert "applied: 0001_" in first.output
    again = run("migrate", "--check", dsn=empty_dsn)
    assert (again.exit_code, again.output) == (0, 'The schema "jobq" is up to date.\n')
    assert run("migrate", dsn=empty_dsn).output == again.output


def test_migrate_makes_a_queue_in_the_schema_that_is_asked_for(dsn: str, db: psycopg.Connection) -> None:
    assert run("migrate", "--schema", "other", "--dsn", dsn).exit_code == 0
    assert db.execute("select count(*) from other.jobs").fetchone() == (0,)


def test_migrate_prints_the_sql_and_needs_no_database_for_that() -> None:
    result = run("migrate", "--sql", "--schema", "other")
    assert (result.exit_code, result.output) == (0, migration_script("other"))


def test_migrate_takes_one_of_check_and_sql(dsn: str) -> None:
    assert run("migrate", "--check", "--sql", dsn=dsn).exit_code == 2


# What can be expected to go wrong


def told(result: Result, *texts: str) -> None:
    """Check that each text stands in the answer, and no traceback."""
    assert "Traceback" not in result.output
    for text in texts:
        assert text in result.output


@pytest.mark.parametrize("command", [("migrate",), ("worker", "app:jobs")])
def test_no_database_is_named(command: tuple[str, ...]) -> None:
    result = run(*command)
    assert result.exit_code == 2
    told(result, "DATABASE_URL", "--dsn")


@pytest.mark.parametrize("command", [("migrate",), ("worker", "app:jobs"), ("demo",)])
def test_the_database_cannot_be_reached(command: tuple[str, ...]) -> None:
    result = run(*command, "--dsn", NOWHERE)
    assert result.exit_code == 1
    told(result, "the database cannot be reached", "Connection refused", "--dsn")


@pytest.mark.parametrize("command", [("migrate",), ("worker", "app:jobs"), ("demo",)])
def test_the_address_of_the_database_cannot_be_read(command: tuple[str, ...]) -> None:
    result = run(*command, "--dsn", "postgresql://[")
    assert result.exit_code == 2
    told(result, "connection string")


def test_there_is_no_schema(empty_dsn: str) -> None:
    result = run("worker", "app:jobs", dsn=empty_dsn)
    assert result.exit_code == 1
    told(result, 'no jobq schema "jobq" in database', "run `jobqctl migrate`")
    for schema, option in (("other", "--schema other"), ("two words", "--schema 'two words'")):
        result = run("worker", "app:jobs", "--schema", schema, dsn=empty_dsn)
        told(result, f'no jobq schema "{schema}"', f"run `jobqctl migrate {option}`")
        result = run("migrate", "--check", "--schema", schema, dsn=empty_dsn)
        assert result.exit_code == 3
        told(result, f"run `jobqctl migrate {option}`")


def test_the_schema_is_too_new(dsn: str, db: psycopg.Connection) -> None:
    db.execute("insert into jobq.schema_version (version, compatible_from) values (999, 999)")
    for command in (("worker", "app:jobs"), ("migrate",)):
        result = run(*command, dsn=dsn)
        assert result.exit_code == 1
        told(result, "upgrade jobq")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["app"], "MODULE:ATTRIBUTE"),
        (["app.py:jobs"], "MODULE:ATTRIBUTE"),
        ([":jobs"], "MODULE:ATTRIBUTE"),
        (["app:"], "MODULE:ATTRIBUTE"),
        ([".:jobs"], "MODULE:ATTRIBUTE"),
        ([".app:jobs"], "MODULE:ATTRIBUTE"),
        (["a..b:jobs"], "MODULE:ATTRIBUTE"),
        (["app:jobs."], "MODULE:ATTRIBUTE"),
        (["a\nb:jobs"], "MODULE:ATTRIBUTE"),
        (["a\0b:jobs"], "MODULE:ATTRIBUTE"),
        (["\udcff:jobs"], "MODULE:ATTRIBUTE"),
        (["app:jobs", "--queue", "\udcff=1"], "surrogate"),
        (["app:jobs", "--queue", "a\x1bb"], "control characters"),
        (["app:jobs", "--queue", "a=" + "9" * 5000], "NAME=SLOTS"),
        (["app:jobs", "--schema", "\udcff"], "Unicode"),
        (["app:jobs", "--dsn", "user=\udcff"], "Unicode"),
        (["app:jobs", "--dsn", "port=many"], "many"),
        (["app:jobs", "--grace", "nan"], "nan"),
        (["app:jobs", "--queue", "mail=many"], "NAME=SLOTS"),
        (["app:jobs", "--queue", "mail=0"], "--queue['mail']: must be 1 to 10,000 slots"),
        (["app:jobs", "--processes", "0"], "--processes"),
        (["app:jobs", "--heartbeat", "20"], "--heartbeat: must be at most a third of the lease (30 s)"),
        (["app:jobs", "--lease", "3"], "--heartbeat: must be at most a third of the lease (3.0 s)"),
        (["app:jobs", "--lease", "0"], "--lease: must be longer than 0"),
        (["app:jobs", "--grace", "-1"], "grace"),
        (["app:jobs", "--schema", "pg_mine"], "pg_"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    dsn: str, arguments: list[str], text: str
) -> None:
    result = run("worker", *arguments, dsn=dsn)
    assert result.exit_code == 2
    told(result, text)


# worker: its settings and its application


def test_settings_reach_the_worker_process_as_they_were_given() -> None:
    settings = ProcessSettings("a:b", "dsn", "schema", {"mail": 5, "a=b": 1}, 9.0, 3.0, 1.5, 7, "info")
    line = settings.to_line()
    assert b"\n" not in line
    assert ProcessSettings.from_line(line) == settings
    config = settings.worker_config()
    assert config.queues == {"mail": 5, "a=b": 1}
    assert (config.lease, config.heartbeat) == (timedelta(seconds=9), timedelta(seconds=3))
    assert config.grace == timedelta(seconds=1.5)
    assert config.crash_limit == 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an application in it."""
    (tmp_path / "shopapp.py").write_text(
        "import jobq\n"
        "jobs = jobq.Jobs()\n"
        "class Config:\n    jobs = jobq.Jobs()\n"
        "@jobs.handler('noted', store_result=True)\n"
        "def noted(job, args): return args\n"
        "@jobs.handler('loop', store_result=True)\n"
        "async def loop(job, args):\n"
        "    import asyncio\n"
        "    return type(asyncio.get_running_loop()).__module__\n"
    )
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "wrong.py").write_text("raise RuntimeError('my own mistake')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("shopapp", "broken", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_jobs_are_found_in_the_current_folder_and_under_dots(folder: Path) -> None:
    assert load_jobs("shopapp:jobs").kinds == ("noted", "loop")
    assert load_jobs("shopapp:Config.jobs").kinds == ()


@pytest.mark.parametrize(
    ("application", "text"),
    [
        ("missing:jobs", "there is no module 'missing'"),
        ("jobq.missing.further:jobs", "there is no module 'jobq.missing'"),
        ("shopapp:missing", "did you mean shopapp:jobs?"),
        ("shopapp:noted", "is a Handler, and a worker needs a jobq.Jobs; did you mean shopapp:jobs?"),
    ],
)
def test_what_is_not_found_is_named(folder: Path, application: str, text: str) -> None:
    with pytest.raises(jobq.ConfigError) as refused:
        load_jobs(application)
    assert text in str(refused.value)


def test_a_mistake_of_the_application_itself_is_not_taken_for_a_missing_module(folder: Path) -> None:
    with pytest.raises(ApplicationError, match="No module named 'nothing_of_that_name'"):
        load_jobs("broken:jobs")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise SystemExit", "it ends the process, by SystemExit(None)"),
        ("import sys; sys.exit('bye')", "it ends the process, by SystemExit('bye')"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("def (", "SyntaxError: invalid syntax"),
        ("x = '\0'", "null bytes"),
        ("def f(): f()\nf()", "RecursionError"),
        ("def __getattr__(name): raise LookupError(name)", "LookupError: jobs"),
        ("import jobq\njobs = jobq.Jobs()\n@jobs.handler('')\nasync def f(job, args): ...", "kind=''"),
    ],
)
def test_however_a_module_ends_its_import_it_is_told_with_its_own_frames_alone(
    folder: Path, source: str, text: str
) -> None:
    (folder / "wrong.py").write_text(source)
    with pytest.raises(ApplicationError) as told:
        load_jobs("wrong:jobs")
    assert "wrong:jobs cannot be imported" in str(told.value)
    assert text in str(told.value)
    for machinery in ("importlib", "application.py"):
        assert machinery not in str(told.value)


def test_a_module_that_takes_itself_away_is_no_fault_of_ours(folder: Path) -> None:
    (folder / "wrong.py").write_text("import sys\nsys.modules[__name__] = 5\n")
    with pytest.raises(jobq.ConfigError, match="module 'wrong' has no 'jobs'"):
        load_jobs("wrong:jobs")


def test_a_folder_that_is_gone_is_named(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    with pytest.raises(jobq.ConfigError, match="the current folder is gone"):
        load_jobs("shopapp:jobs")


def result_of(db: psycopg.Connection, kind: str, worker: PythonProcess) -> Any:
    """Wait for the result of the one job of a kind, which this worker runs."""

    def completed() -> Any:
        query = "select result from jobq.jobs where state = 'completed' and kind = %s"
        return db.execute(query, [kind]).fetchone()

    try:
        return eventually(completed, 30.0)[0]
    except AssertionError as error:
        raise AssertionError(f"{error}; the worker said:\n{worker.output}") from error


def start(spawn_python: SpawnPython, dsn: str, folder: Path, *arguments: str) -> PythonProcess:
    return spawn_python("-m", "jobq.cli", "worker", *arguments, env={"DATABASE_URL": dsn}, cwd=folder)


def test_worker_runs_the_jobs_of_an_application(
    spawn_python: SpawnPython, dsn: str, db: psycopg.Connection, folder: Path
) -> None:
    db.execute("select jobq.enqueue('noted', '{\"a\": 1}', queue => 'mail')")
    worker = start(spawn_python, dsn, folder, "shopapp:jobs", "--queue", "default", "--queue", "mail=5")

    assert result_of(db, "noted", worker) == {"a": 1}
    worker.terminate()
    assert worker.wait() == 0, worker.output


def test_worker_takes_uvloop_where_it_is_installed(
    spawn_python: SpawnPython, dsn: str, db: psycopg.Connection, folder: Path
) -> None:
    db.execute("select jobq.enqueue('loop')")
    worker = start(spawn_python, dsn, folder, "shopapp:jobs")
    assert result_of(db, "loop", worker) == "uvloop"


@pytest.mark.parametrize(
    ("application", "texts"),
    [
        ("missing:jobs", ["there is no module 'missing'", "PYTHONPATH"]),
        ("shopapp:noted", ["did you mean shopapp:jobs?"]),
        ("leaves:jobs", ["leaves:jobs cannot be imported: it ends the process, by SystemExit(0)"]),
    ],
)
def test_worker_says_in_one_line_what_is_wrong_with_an_application_and_ends(
    spawn_python: SpawnPython, dsn: str, folder: Path, application: str, texts: list[str]
) -> None:
    worker = start(spawn_python, dsn, folder, application, "--processes", "3")
    assert worker.wait() == 2, worker.output
    for text in texts:
        assert worker.output.count(text) == 1
    assert "Traceback" not in worker.output


def test_worker_shows_the_traceback_of_an_applications_own_mistake_once(
    spawn_python: SpawnPython, dsn: str, folder: Path
) -> None:
    worker = start(spawn_python, dsn, folder, "wrong:jobs", "--processes", "3")
    assert worker.wait() == 2, worker.output
    assert worker.output.count("RuntimeError: my own mistake") == 1


def test_no_password_stands_in_a_command_line(spawn_python: SpawnPython, dsn: str, folder: Path) -> None:
    worker = start(spawn_python, f"{dsn}&password=secret", folder, "shopapp:jobs")
    output = worker.wait_for_output("works on")
    child = output.partition("started (pid ")[2].partition(")")[0]
    assert b"secret" not in Path(f"/proc/{child}/cmdline").read_bytes()
    assert "secret" not in worker.output
