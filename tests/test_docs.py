"""The documentation is true: its code runs, its commands work, its diagram is the code's.

Each file of `docs/` is one story: its blocks run from top to bottom, in one folder with a small application
(`tests/docs_app.py` as ``myapp/jobs.py``), on a database of its own. `python` blocks share one namespace and
may await; `sh` blocks run in bash and stop at the first failure; `sql` blocks run as one transaction each;
`yaml`, `json` and `toml` are parsed. What cannot run says so in a comment before it, with the reason.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from yaml import safe_load as parse_yaml

import jobq
from jobq import _statements
from jobq._statements.bulk import APPLIES_TO
from jobq._statements.bulk_sql import WRITERS, Settings
from jobq._statements.filter import Query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq.embedded import EmbeddedPostgres

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))

_BLOCK = re.compile(
    r"(?:<!-- not executed: (?P<why>[^\n]+?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_PARSERS: dict[str, Callable[[str], object]] = {
    "yaml": parse_yaml,
    "json": json.loads,
    "toml": tomllib.loads,
}
_SHOWN_ONLY = {"", "text", "mermaid", "ini", "diff", "dockerfile"}
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class Block(NamedTuple):
    language: str
    text: str
    line: int
    not_executed: str | None


def blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("fence")) + 2
        yield Block(match["language"], match["text"], line, match["why"])


@pytest.fixture
def place(
    tmp_path: Path, dsn: str, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Make a folder with the application ``myapp``, and be in it with its database in the environment."""
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "docs_app.py", tmp_path / "myapp" / "jobs.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.syspath_prepend(str(tmp_path))
    programs = [str(Path(program).parent) for program in (sys.executable, server.program("psql"))]
    monkeypatch.setenv("PATH", os.pathsep.join([*programs, os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "myapp"]:
        del sys.modules[name]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_every_block_of_the_documentation_works(path: Path, place: Path, dsn: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__docs__", "DSN": dsn}
    with asyncio.Runner() as runner:
        for block in blocks_of(path):
            if block.not_executed is None:
                run_block(block, path, namespace, runner, dsn)


def run_block(block: Block, path: Path, namespace: dict[str, Any], runner: asyncio.Runner, dsn: str) -> None:
    where = f"{path.name}:{block.line}"
    if block.language == "python":
        padded = "\n" * (block.line - 1) + block.text
        code = compile(padded, str(path), "exec", flags=_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            runner.run(eval(code, namespace))
        else:
            exec(code, namespace)
    elif block.language == "sh":
        run_shell(block.text, where)
    elif block.language == "sql":
        with psycopg.connect(dsn) as connection:
            connection.execute(block.text.encode())
    elif block.language in _PARSERS:
        assert _PARSERS[block.language](block.text), where
    else:
        assert block.language in _SHOWN_ONLY, f"{where}: {block.language!r} is neither run nor only shown"


def run_shell(text: str, where: str) -> None:
    ran = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, f"{where}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.usefixtures("place")
def test_what_a_clock_that_was_ahead_has_put_off_comes_now_by_the_command_and_nothing_else(
    dsn: str, db: psycopg.Connection
) -> None:
    with jobq.Client(dsn) as client:
        retried, snoozed, _meant = (client.enqueue("report", delay=timedelta(days=1)).id for _ in range(3))
        soon = client.enqueue("report", delay=timedelta(seconds=50)).id
    for job_id, reason in [(retried, "retry"), (snoozed, "snooze"), (soon, "retry")]:
        db.execute("update jobq.scheduled set reason = %s where job_id = %s", [reason, job_id])
    path = ROOT / "docs" / "operation.md"
    [block] = [block for block in blocks_of(path) if "the clock was ahead" in block.text]
    run_shell(block.text, path.name)
    due = db.execute("select job_id from jobq.scheduled where run_at <= now() order by job_id").fetchall()
    assert due == [(retried,), (snoozed,)]


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md", ROOT / "DESIGN.md"], ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


# The states


def moves_of_the_code() -> set[tuple[str, str]]:
    """Read from every statement which tables it deletes from and which it inserts into."""
    moves: set[tuple[str, str]] = set()
    for statement in statements():
        gone = set(re.findall(r"delete from \{schema\}\.(ready|scheduled|running|finished)\b", statement))
        come = set(re.findall(r"insert into \{schema\}\.(ready|scheduled|running|finished)\b", statement))
        if re.search(r"insert into \{schema\}\.job\b", statement):
            moves |= {("[*]", target) for target in come & {"ready", "scheduled"}}
        if re.search(r"delete from \{schema\}\.job\b", statement):
            moves |= {(source, "[*]") for source in gone}
        moves |= {(source, target) for source in gone for target in come if source != target}
    return moves


def statements() -> Iterator[str]:
    """Yield every constant of the modules of jobq that is a statement, and what bulk actions compose."""
    for module in pkgutil.iter_modules(_statements.__path__, f"{_statements.__name__}."):
        if not module.ispkg:
            constants = vars(importlib.import_module(module.name)).values()
            yield from (text for text in constants if isinstance(text, str) and "{schema}." in text)
    for action, states in APPLIES_TO.items():
        for state in states:
            yield WRITERS[action](Query(), state, Settings(), ("", "", "", "")).ctes


def test_the_diagram_of_the_states_is_what_the_statements_do() -> None:
    text = (ROOT / "docs" / "states.md").read_text()
    diagram = re.search(r"```mermaid\n(.*?)```", text, re.DOTALL)
    assert diagram is not None
    terminal = {"completed", "discarded", "cancelled"}
    drawn = {
        ("finished" if source in terminal else source, "finished" if target in terminal else target)
        for source, target in re.findall(r"^\s*(\S+) --> (\w+|\[\*\])", diagram[1], re.MULTILINE)
    }
    assert drawn == moves_of_the_code()


# The commands


def test_the_page_of_the_commands_is_what_they_say_of_themselves() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "document_commands.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
