"""What the papers say is true: README's program runs, and its tables name every option and setting."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import pytest

import jobq
from jobq._worker import exit_codes
from jobq.cli.periodic import periodic

if TYPE_CHECKING:
    from tests.conftest import SpawnPython

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.matrix
def test_the_first_program_of_the_readme_runs_as_it_stands(
    empty_dsn: str, spawn_python: SpawnPython, tmp_path: Path
) -> None:
    program = tmp_path / "app.py"
    program.write_text(code_blocks("python")[0])
    process = spawn_python(str(program), env={"DATABASE_URL": empty_dsn})
    process.wait_for_output("to user@example.com")
    process.wait_for_output("to b@example.com")
    process.terminate()
    assert process.wait(20) == 0, process.output


def test_every_python_block_is_python() -> None:
    for block in code_blocks("python"):
        compile(block, "README.md", "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT


def test_every_job_option_stands_in_the_table() -> None:
    for option in get_type_hints(jobq.JobOptions):
        assert f"`{option}`" in README, option


def test_every_worker_setting_stands_in_the_table_with_its_default() -> None:
    config = jobq.WorkerConfig()
    for setting in dataclasses.fields(config):
        assert f"`{setting.name}`" in README, setting.name
    rows = dict(re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)?) \| ([^|]+) \|", README, re.MULTILINE))
    assert rows["`lease`, `heartbeat`"] == f"{config.lease.seconds} s, {config.heartbeat.seconds} s"
    assert rows["`poll`"] == f"{config.poll.seconds} s"
    assert rows["`grace`"] == f"{config.grace.seconds} s"
    assert rows["`cancel_grace`"] == f"{config.cancel_grace.seconds} s"
    assert rows["`prefetch`, `prefetch_horizon`"] == f"{config.prefetch}, 40 ms"
    assert rows["`crash_limit`"] == str(config.crash_limit)
    assert rows["`pending_outcomes`"] == f"{config.pending_outcomes:,}"
    assert rows["`completion_batch`, `completion_delay`"] == f"{config.completion_batch}, 4 ms"


def test_every_extra_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [line] = [line for line in README.splitlines() if line.startswith("The extras: ")]
    assert set(re.findall(r"`(\w+)`", line)) == set(project["optional-dependencies"])


def test_what_schedules_can_be_told_is_what_there_is() -> None:
    verbs = [verb for verb in vars(type(jobq.Client("host=nowhere").periodic)) if not verb.startswith("_")]
    assert "`client.periodic` can " + _listed(verbs) + " them," in " ".join(README.split())
    assert set(periodic.commands) == set(verbs) - {"add"}


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def test_every_exit_code_is_told() -> None:
    for name, value in vars(exit_codes).items():
        if name.startswith("EXIT_"):
            assert f" {value} " in README, name


def test_every_public_name_has_a_docstring() -> None:
    for name in jobq.__all__:
        thing = getattr(jobq, name)
        if isinstance(thing, type) or callable(thing):
            assert thing.__doc__, name


def test_the_papers_name_nothing_that_is_only_on_a_developers_machine() -> None:
    for paper in (*ROOT.glob("*.md"), *ROOT.glob("tests/*.md")):
        assert not re.search(r"/work/|/root/|localhost:\d{4,5}/simple", paper.read_text()), paper
