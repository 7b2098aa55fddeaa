"""Write docs/commands.md: every command of jobqctl with its options, as the program itself explains them.

python scripts/document_commands.py          writes it
python scripts/document_commands.py --check  exits with 1 when it is not up to date
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobq.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).parent.parent / "docs" / "commands.md"
HEADING = """# Commands

What `jobqctl` does, as `jobqctl COMMAND --help` says it. Every command takes `--dsn` (or `DATABASE_URL`) and
`--schema`. Exit codes: 0 fine, 1 failed or something is wrong, 2 wrong usage, 3 migrations are pending
(`migrate --check`), 128 + N after a second signal N (`worker`).
"""


def page() -> str:
    """Return the page's text."""
    return HEADING + "".join(section for _, section in sorted(sections(app, "jobqctl")))


def sections(group: click.Group, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each command's full name and its section."""
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        yield full, section(full, command)
        if isinstance(command, click.Group):
            yield from sections(command, full)


def section(name: str, command: click.Command) -> str:
    """Return what one command says of itself."""
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [
        f"\n## {name}",
        "",
        f"    {usage}",
        "",
        inspect.cleandoc(command.help or "").replace("*", "\\*"),
        "",
    ]
    records = [
        record
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in {"dsn", "schema"}
        if (record := parameter.get_help_record(context)) is not None
    ]
    if records:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{cell(option)}` | {cell(meaning)} |" for option, meaning in records]
    return "\n".join(lines).rstrip() + "\n"


def cell(text: str) -> str:
    """Return a text as a table's cell can hold it."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    if "--check" not in sys.argv:
        TARGET.write_text(page())
    elif TARGET.read_text() != page():
        sys.exit(f"{TARGET.name} is not up to date: run python scripts/document_commands.py")
