"""`jobqctl` with any arguments: an exit code that is documented, and a message; never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, Final

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq.cli.app import app
from tests.support.odd import documents, fuzz, moments, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq.embedded import Databases, EmbeddedPostgres

pytestmark = pytest.mark.fuzz

EXIT_CODES: Final = {0, 1, 2, 3}
# They run until they are stopped, or start a server; a worker's options stand in test_cli.py.
LASTING: Final = {"bench", "demo", "worker"}
ENDLESS: Final = {"--watch"}


@pytest.fixture(scope="module")
def address(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[str]:
    name = databases.create(template=template)
    with jobq.Client(server.dsn(name)) as client:
        client.enqueue_many(jobq.NewJob(f"k{n % 3}", {"n": n}, tags=["t"], unique=f"u{n}") for n in range(30))
        client.cancel(5)
        client.periodic.add("nightly", "k", None, cron="0 3 * * *")
        client.queues.pause("q", reason="\x1b[31m\u202e")
    yield server.dsn(name)
    databases.drop(name)


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif name not in LASTING:
            yield (*path, name), command


COMMANDS: Final = dict(commands(app))

words = (
    texts.map(lambda text: text.replace("\0", ""))
    | st.integers().map(str)
    | st.integers(-2, 40).map(str)
    | st.tuples(st.integers(0, 10**6), st.sampled_from("smhdwy")).map(lambda pair: f"{pair[0]}{pair[1]}")
    | st.floats().map(str)
    | moments.map(lambda moment: moment.isoformat())
    | documents.map(json.dumps)
    | st.sampled_from(
        ["default", "k1", "q", "t", "nightly", "keep", "ready", "running", "done", "", "-", "--", "{", "NaN",
         '{"a": NaN}', '{"a": 1e999}', "ready.5.", "2030-01-01T00:00:00Z",
         "0001-01-01T00:00+14:00", "1e9999s", "9" * 5000, "'; drop table jobq.job; --",
         "%s %(x)s $1 {schema}", "\udcff\udc80", "infinity"]
    )
)  # fmt: skip


def some_options(command: click.Command) -> st.SearchStrategy[list[str]]:
    """Return arguments for a command: some of its options with any values, and words between them."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    flags = [name for one in options if one.is_flag for name in one.opts if name not in ENDLESS]
    takes = [one.opts[-1] for one in options if not one.is_flag]
    valued = [st.tuples(st.sampled_from(takes), words)] if takes else []
    flagged = [st.sampled_from(flags).map(lambda flag: (flag,))] if flags else []
    pieces = st.one_of(*valued, *flagged, words.map(lambda word: (word,)))
    return st.lists(pieces, max_size=5).map(lambda found: [part for piece in found for part in piece])


invocations = st.sampled_from(sorted(COMMANDS)).flatmap(
    lambda path: some_options(COMMANDS[path]).map(lambda arguments: [*path, *arguments])
)


@fuzz(150)
@given(arguments=invocations | st.lists(words, max_size=3))
def test_any_arguments_end_with_a_documented_code_and_a_message(address: str, arguments: list[str]) -> None:
    environment = {"DATABASE_URL": address, "COLUMNS": "200"}
    result = CliRunner().invoke(app, arguments, input="{}", env=environment, prog_name="jobqctl")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in EXIT_CODES
    assert "Traceback" not in result.output
    assert result.output or result.exit_code == 0
    if result.exit_code == 0:  # else it may tell what it was given itself
        obeyed = [c for c in result.stdout if unicodedata.category(c) == "Cc" and c not in "\n\t"]
        assert obeyed == []


argv = st.binary(max_size=20).map(lambda raw: raw.replace(b"\0", b"")) | words.map(
    lambda word: word.encode("utf-8", "surrogatepass")
)


@fuzz(4)
@given(
    path=st.sampled_from([["list"], ["enqueue"], ["cancel"], ["show"], ["periodic", "pause"], []]),
    arguments=st.lists(argv, min_size=1, max_size=4),
    locale=st.sampled_from(["C", "C.UTF-8", "POSIX"]),
)
def test_any_bytes_in_a_command_line_end_with_a_documented_code_and_a_message(
    address: str, path: list[str], arguments: list[bytes], locale: str
) -> None:
    environment = {**os.environ, "DATABASE_URL": address, "LC_ALL": locale, "PYTHONUTF8": "0"}
    command: list[Any] = [sys.executable, "-m", "jobq.cli", *path, *arguments]
    done = subprocess.run(command, input=b"{}", capture_output=True, env=environment, check=False, timeout=60)
    assert done.returncode in EXIT_CODES
    assert b"Traceback" not in done.stderr
    assert done.stdout or done.stderr or done.returncode == 0
